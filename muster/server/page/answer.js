// Messages on the page: what was asked, and the answer as it comes.

import { element } from "./element.js";
import { Flow } from "./flow.js";
import { counted, rate, seconds } from "./numbers.js";

const ENDINGS = { length: "cut off at the limit of tokens", stopped: "stopped" };

/** A question. */
export function question(text) {
  return element("article", { class: "question", "aria-label": "You" }, text);
}

/** An answer; `node` is its article. */
export class Answer {
  #thoughts = element("div", { class: "text" });
  #reasoning = element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.#thoughts);
  #text = element("div", { class: "text" });
  #foot = element("p", { class: "foot" }, "waiting for the first token");
  #thinking = new Flow(this.#thoughts);
  #saying = new Flow(this.#text);
  node = element("article", { class: "answer", "aria-label": "Answer" }, this.#reasoning, this.#text, this.#foot);

  constructor() {
    this.#reasoning.hidden = true;
    this.node.ariaBusy = "true";
  }

  /** Adds a piece of a completion. */
  add({ content, reasoning }, pace) {
    if (reasoning) {
      this.#reasoning.hidden = false;
      this.#thinking.add(reasoning);
    }
    if (content) this.#saying.add(content);
    if (pace.tokens) this.#foot.textContent = figures(pace);
  }

  /** It is over, as `finish` says. */
  end(finish, pace) {
    this.#close([...(pace.tokens ? [figures(pace)] : []), ...(ENDINGS[finish] ? [ENDINGS[finish]] : [])]);
  }

  /** It broke off. */
  fail(message, pace) {
    this.node.insertBefore(element("p", { class: "error", role: "alert" }, message), this.#foot);
    this.#close(pace.tokens ? [figures(pace)] : []);
  }

  #close(words) {
    this.#thinking.flush();
    this.#saying.flush();
    this.#foot.textContent = words.join(" · ");
    this.node.ariaBusy = "false";
  }
}

function figures(pace) {
  const speed = pace.rate === null ? [] : [`${rate(pace.rate)} tok/s`];
  return [counted(pace.tokens, "token"), ...speed, `first after ${seconds(pace.wait)}`].join(" · ");
}
