// One streamed answer of /v1/chat/completions.

import { Refusal, Unreachable, reading } from "./api.js";
import { events } from "./events.js";

/**
 * Pieces of the model's answer to a conversation: `{content, reasoning, tokens, finish}`, where `finish` says in the
 * last one why it ended. Aborting the signal ends the work on the server too.
 */
export async function* completion(api, messages, options, signal) {
  const body = JSON.stringify({ messages, ...options, stream: true, return_token_ids: true });
  const headers = { "Content-Type": "application/json" };
  const response = await api.open("v1/chat/completions", { method: "POST", headers, body, signal });
  const source = events(response.body);
  try {
    for (;;) {
      const { done, value } = await reading(() => source.next());
      if (done) throw new Unreachable("the connection was lost before the answer ended");
      if (value === "[DONE]") return;
      yield piece(JSON.parse(value));
    }
  } finally {
    source.return();
  }
}

function piece(chunk) {
  if (chunk.error) throw new Refusal(500, chunk.error);
  const [choice] = chunk.choices;
  return {
    content: choice.delta.content ?? "",
    reasoning: choice.delta.reasoning_content ?? "",
    tokens: choice.token_ids?.length ?? 0,
    finish: choice.finish_reason,
  };
}
