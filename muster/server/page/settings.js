// How answers are asked for.

import { byId } from "./element.js";

/** The dialog; its fields are the settings. */
export class Settings {
  constructor() {
    byId("settings-open").addEventListener("click", () => byId("settings").showModal());
  }

  /** The system prompt, "" for none. */
  get system() {
    return byId("system").value.trim();
  }

  /** Fields of the request; what is left empty is up to the server. */
  get options() {
    const given = { temperature: byId("temperature").valueAsNumber, max_tokens: byId("max-tokens").valueAsNumber };
    return Object.fromEntries(Object.entries(given).filter(([, value]) => !Number.isNaN(value)));
  }
}
