// What the server does now, asked again and again.

import { Refusal, Unreachable } from "./api.js";

const PAUSE = 1000;

/**
 * What is seen of the server about once a second, while somebody looks at the page: `{kind, reasons, state}`, where
 * `kind` is "ready", "not ready", "loading" or "lost", and `state` is /v1/muster/state or null.
 */
export async function* sightings(api) {
  for (;;) {
    await visible();
    yield await look(api);
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

async function look(api) {
  try {
    const state = await api.document("v1/muster/state");
    return { kind: state.ready ? "ready" : "not ready", reasons: state.reasons, state };
  } catch (error) {
    if (!(error instanceof Refusal || error instanceof Unreachable)) throw error;
    if (error.status === 503) return { kind: "loading", reasons: error.found, state: null };
    return { kind: "lost", reasons: [error.message], state: null };
  }
}

async function visible() {
  while (document.hidden) {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}
