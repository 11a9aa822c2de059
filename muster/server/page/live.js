// The figures at the top of the page.

import { byId, element, say } from "./element.js";
import { count, rate } from "./numbers.js";

const SAMPLES = 60;

/** What the server does now, and how fast. */
export class Live {
  #before = null;
  #rates = [];

  /** Shows a sighting. */
  show({ kind, reasons, state }) {
    const readiness = byId("readiness");
    readiness.dataset.kind = kind;
    say(readiness, kind);
    this.#reasons(reasons);
    this.#rate(state);
    const pages = state?.pages;
    say(byId("running"), state ? count(state.running) : "–");
    say(byId("waiting"), state ? count(state.waiting) : "–");
    say(byId("pages-used"), pages ? count(pages.all - pages.free) : "–");
    say(byId("pages-all"), pages ? count(pages.all) : "–");
    byId("pages").value = pages ? (pages.all - pages.free) / pages.all : 0;
  }

  /** Shows the pace of the newest answer. */
  pace(pace) {
    say(byId("answer-rate"), rate(pace.rate));
  }

  #reasons(reasons) {
    const list = byId("reasons");
    const told = [...list.children].map((item) => item.textContent);
    if (told.join("\n") === reasons.join("\n")) return;
    list.replaceChildren(...reasons.map((reason) => element("li", {}, reason)));
    list.hidden = reasons.length === 0;
  }

  /** The server's speed is what its counter grew by since the last look. */
  #rate(state) {
    const now = { time: performance.now(), tokens: state?.generated_tokens ?? null };
    const before = this.#before;
    const known = before !== null && before.tokens !== null && now.tokens !== null && now.tokens >= before.tokens;
    const speed = known ? (1000 * (now.tokens - before.tokens)) / (now.time - before.time) : null;
    this.#before = now;
    this.#rates = [...this.#rates, speed ?? 0].slice(-SAMPLES);
    say(byId("server-rate"), rate(speed));
    this.#draw();
  }

  #draw() {
    const most = Math.max(1, ...this.#rates);
    const from = SAMPLES - this.#rates.length;
    const points = this.#rates.map((speed, index) => `${from + index},${(19 - (18 * speed) / most).toFixed(1)}`);
    byId("history").firstElementChild.setAttribute("points", points.join(" "));
  }
}
