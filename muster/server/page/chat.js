// The conversation: asking, stopping, starting anew.

import { Answer, question } from "./answer.js";
import { completion } from "./completion.js";
import { Conversation } from "./conversation.js";
import { byId } from "./element.js";
import { Follower } from "./follow.js";
import { Pace } from "./pace.js";

export class Chat {
  #api;
  #settings;
  #onPace;
  #conversation = new Conversation();
  #running = null;
  #input = byId("question");
  #log = byId("log");
  #messages = byId("messages");
  #greeting = byId("greeting");
  #follower = new Follower(this.#log, this.#messages);

  /** Asks through `api` as `settings` say; `onPace` is told of the pace of the newest answer. */
  constructor(api, settings, onPace) {
    this.#api = api;
    this.#settings = settings;
    this.#onPace = onPace;
    byId("composer").addEventListener("submit", (event) => this.#submit(event));
    byId("new").addEventListener("click", () => this.#restart());
    byId("stop").addEventListener("click", () => this.#stop());
    this.#input.addEventListener("keydown", (event) => this.#enter(event));
    document.addEventListener("keydown", (event) => this.#escape(event));
  }

  #submit(event) {
    event.preventDefault();
    const text = this.#input.value;
    if (this.#running || !text.trim()) return;
    this.#input.value = "";
    this.#greeting.remove();
    this.#ask(text);
  }

  /** Shows a question and its answer as it comes. */
  async #ask(text) {
    const exchange = this.#conversation.ask(text);
    const answer = new Answer();
    const pace = new Pace(performance.now());
    this.#messages.append(question(text), answer.node);
    this.#follower.jump();
    const running = this.#begin();
    try {
      const messages = this.#conversation.messages(this.#settings.system);
      let finish = null;
      for await (const piece of completion(this.#api, messages, this.#settings.options, running.signal)) {
        pace.add(piece.tokens, performance.now());
        exchange.answer += piece.content;
        answer.add(piece, pace);
        this.#onPace(pace);
        finish = piece.finish ?? finish;
      }
      answer.end(finish, pace);
    } catch (error) {
      if (running.signal.aborted) answer.end("stopped", pace);
      else this.#fail(error, exchange, answer, pace);
    } finally {
      this.#end(running);
    }
  }

  #fail(error, exchange, answer, pace) {
    answer.fail(error.message, pace);
    // A question without an answer can be asked again.
    if (!exchange.answer && !this.#input.value) this.#input.value = exchange.question;
  }

  #begin() {
    this.#running = new AbortController();
    this.#log.ariaBusy = "true";
    this.#show(true);
    return this.#running;
  }

  #end(running) {
    if (this.#running !== running) return;
    this.#running = null;
    this.#follower.keep();
    this.#log.ariaBusy = "false";
    this.#show(false);
  }

  /** One button takes the place of the other, and its focus. */
  #show(running) {
    const focused = document.activeElement === byId(running ? "send" : "stop");
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    if (focused) (running ? byId("stop") : this.#input).focus();
  }

  #stop() {
    this.#running?.abort();
  }

  #restart() {
    const running = this.#running;
    this.#stop();
    if (running) this.#end(running);
    this.#conversation = new Conversation();
    this.#messages.replaceChildren(this.#greeting);
    this.#input.focus();
  }

  #enter(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  }

  #escape(event) {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.#stop();
  }
}
