// Staying at the newest line.

/** Keeps a viewport at the bottom of its growing content while its reader is there and it is busy. */
export class Follower {
  #viewport;
  #bottom = true;

  constructor(viewport, content) {
    this.#viewport = viewport;
    viewport.addEventListener("scroll", () => (this.#bottom = this.#distance < 16), { passive: true });
    // What grows while nothing is written, the reader has unfolded: it must stay where it is.
    new ResizeObserver(() => viewport.ariaBusy === "true" && this.keep()).observe(content);
    new ResizeObserver(() => this.keep()).observe(viewport);
  }

  /** Back to the bottom, if the reader was there. */
  keep() {
    if (this.#bottom) this.jump();
  }

  /** To the bottom. */
  jump() {
    this.#viewport.scrollTop = this.#viewport.scrollHeight;
  }

  get #distance() {
    return this.#viewport.scrollHeight - this.#viewport.scrollTop - this.#viewport.clientHeight;
  }
}
