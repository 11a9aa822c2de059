// A text that grows.

/** Adds to a node once a frame: a fast model writes more often than a screen shows. */
export class Flow {
  #node = new Text("");
  #pending = "";
  #frame = 0;

  constructor(parent) {
    parent.append(this.#node);
  }

  add(text) {
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Shows all of it now. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#node.appendData(this.#pending);
    this.#pending = "";
  }
}
