// Calls to the server that sent this page.

/** The server answered that it will not; `message` is its own, and `found` what it found, a text for each problem. */
export class Refusal extends Error {
  constructor(status, { message, reasons }) {
    super(message);
    this.status = status;
    this.found = reasons.map((reason) => reason.found);
  }
}

/** No answer came, or it broke off. */
export class Unreachable extends Error {}

export class Api {
  #key;

  /** Calls with this key. */
  constructor(key) {
    this.#key = key;
  }

  /** The response to a request; asks for a key as often as the server wants another. */
  async open(path, options = {}) {
    for (;;) {
      const key = this.#key.value;
      const response = await answered(path, key === null ? options : authorised(options, key));
      if (response.ok) return response;
      if (response.status !== 401) throw new Refusal(response.status, await problem(response));
      await this.#key.replace(key);
    }
  }

  /** The JSON document at a path, unless it takes more than some milliseconds. */
  async document(path, patience = 5000) {
    const response = await this.open(path, { signal: AbortSignal.timeout(patience) });
    return reading(() => response.json());
  }
}

/** Runs what reads from the server; a connection that breaks is `Unreachable`. */
export async function reading(read) {
  try {
    return await read();
  } catch (error) {
    if (error instanceof TypeError || error.name === "TimeoutError") throw new Unreachable("the connection was lost");
    throw error;
  }
}

function answered(path, options) {
  return reading(() => fetch(path, { cache: "no-store", credentials: "omit", ...options }));
}

function authorised(options, key) {
  return { ...options, headers: { ...options.headers, Authorization: `Bearer ${key}` } };
}

/** The server's error object; what stands between it and this page may have answered in another way. */
async function problem(response) {
  const text = await reading(() => response.text());
  try {
    return JSON.parse(text).error;
  } catch {
    return { message: `HTTP ${response.status} ${response.statusText}`, reasons: [] };
  }
}
