// Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html

/** Bytes in, the data of whole events out; however the bytes are cut, the events are the same. */
export class EventParser {
  #decoder = new TextDecoder();
  #rest = "";
  #data = [];

  feed(bytes) {
    // A carriage return at the end may be the first half of a line break.
    const lines = (this.#rest + this.#decoder.decode(bytes, { stream: true })).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#take(line));
  }

  #take(line) {
    if (line === "") {
      const data = this.#data;
      this.#data = [];
      return data.length ? [data.join("\n")] : [];
    }
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (field === "data") this.#data.push(value);
    return [];
  }
}

/** The data of each event in the body of a response. */
export async function* events(body) {
  const parser = new EventParser();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
