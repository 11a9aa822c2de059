// The API key that a server may ask for.

const NAME = "muster-api-key";

/** Kept for this tab alone, and asked for in a dialog that stays until there is one. */
export class Key {
  #dialog;
  #input;
  #reason;
  #waiting = [];

  constructor(dialog, input, reason) {
    this.#dialog = dialog;
    this.#input = input;
    this.#reason = reason;
    dialog.addEventListener("submit", () => this.#take());
    dialog.addEventListener("close", () => this.#waiting.length && dialog.showModal());
  }

  /** The key, null when none was given. */
  get value() {
    return sessionStorage.getItem(NAME);
  }

  /** Resolves when there is another key than the one which the server refused. */
  async replace(refused) {
    if (this.value !== refused) return;
    this.#reason.textContent =
      refused === null ? "This server asks for an API key." : "The server does not know that key.";
    if (!this.#dialog.open) this.#dialog.showModal();
    await new Promise((resolve) => this.#waiting.push(resolve));
  }

  #take() {
    sessionStorage.setItem(NAME, this.#input.value.trim());
    this.#input.value = "";
    for (const resolve of this.#waiting.splice(0)) resolve();
  }
}
