// How fast an answer comes.

/** Counts tokens; times are milliseconds of `performance.now`. */
export class Pace {
  #asked;
  #first = null;
  #last = null;
  #opening = 0;
  tokens = 0;

  constructor(now) {
    this.#asked = now;
  }

  add(tokens, now) {
    if (tokens === 0) return;
    if (this.#first === null) {
      this.#first = now;
      this.#opening = tokens;
    }
    this.#last = now;
    this.tokens += tokens;
  }

  /** Milliseconds until the first token, null before it. */
  get wait() {
    return this.#first === null ? null : this.#first - this.#asked;
  }

  /** Tokens per second after the first, whose time is that of the prompt; null while there is none. */
  get rate() {
    const later = this.tokens - this.#opening;
    return later > 0 && this.#last > this.#first ? (1000 * later) / (this.#last - this.#first) : null;
  }
}
