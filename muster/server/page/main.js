// The page: a chat with the model, what the server does meanwhile, and the plan that it runs.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, say } from "./element.js";
import { Key } from "./key.js";
import { Live } from "./live.js";
import { Panel } from "./panel.js";
import { showPlan, summary } from "./plan.js";
import { Settings } from "./settings.js";
import { sightings } from "./state.js";

const api = new Api(new Key(byId("key"), byId("key-value"), byId("key-reason")));
const live = new Live();
new Panel(byId("plan"), byId("plan-toggle"));
new Chat(api, new Settings(), (pace) => live.pace(pace));

let introduced = false;
for await (const seen of sightings(api)) {
  live.show(seen);
  // A server that was away may come back with another model.
  introduced = seen.state !== null && (introduced || (await introduce()));
}

/** Shows which model is served and on what plan; whether the server said it. */
async function introduce() {
  try {
    const [models, plan] = await Promise.all([api.document("v1/models"), api.document("v1/muster/plan")]);
    const [model] = models.data;
    say(byId("model"), model.id);
    say(byId("greeting-model"), model.id);
    say(byId("greeting-plan"), summary(plan));
    showPlan(plan);
    return true;
  } catch {
    return false;
  }
}
