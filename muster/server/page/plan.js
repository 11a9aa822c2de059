// The plan: which backend computes what for how many tokens, on what evidence, and why the others do not.

import { byId, drawing, element } from "./element.js";
import { count, counted, percent, times } from "./numbers.js";

const ROLES = { experts: "Experts", draft: "Draft experts", linears: "Linear" };
const ORDER = Object.keys(ROLES);

/** Shows the document of /v1/muster/plan. */
export function showPlan(plan) {
  const parts = plan.parts.toSorted((one, other) => ORDER.indexOf(one.role) - ORDER.indexOf(other.role));
  byId("plan-mark").replaceChildren(mark(plan.proven));
  byId("plan-body").replaceChildren(
    element("p", {}, summary(plan)),
    ...plan.remarks.map((remark) => element("p", { class: "remark" }, remark)),
    ...parts.map(section),
    element("p", { class: "legend muted" }, "Floor: the least time that this machine's hardware allows."),
  );
}

/** The plan in one sentence. */
export function summary(plan) {
  const all = counted(plan.parts.length, "part");
  if (plan.proven) return `Each of its ${all} runs on backends that have passed muster.`;
  const without = plan.parts.filter((part) => !part.proven).length;
  return `${count(without)} of its ${all} ${without === 1 ? "is" : "are"} without evidence that the results are right.`;
}

function section(part) {
  const title = element("h3", {}, ROLES[part.role] ?? part.role, " ", element("small", {}, shape(part.problem)));
  const heads = ["Tokens", "Backend", "Share of floor", "Proof"].map((head) => element("th", { scope: "col" }, head));
  const rows = part.entries.map((entry, index) => row(entry, reach(part.entries, index)));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
  return element("section", { class: "part" }, title, table, ...(part.losers.length ? [losers(part.losers)] : []));
}

function shape(problem) {
  const size = problem.experts
    ? `${count(problem.experts)} of ${problem.hidden} × ${problem.inner}, top ${problem.routing.top_k}`
    : `${problem.rows} × ${problem.columns}`;
  return `${size}, ${problem.weights}`;
}

function reach(entries, index) {
  const from = index ? entries[index - 1].max_tokens + 1 : 1;
  const to = entries[index].max_tokens;
  if (to === null) return index ? `${from}+` : "any";
  return from === to ? `${to}` : `${from}–${to}`;
}

function row(entry, tokens) {
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, tokens),
    element("td", {}, element("strong", {}, entry.backend), element("small", {}, entry.reason)),
    element("td", {}, ...speed(entry)),
    element("td", {}, entry.evidence.length ? proof(entry.evidence.length) : mark(false)),
  );
}

function speed({ of_floor: share, ahead }) {
  const lead = ahead ? [element("small", {}, `${times(ahead)} ahead`)] : [];
  if (!share) return [element("span", { class: "muted" }, "not timed"), ...lead];
  return [bar(share), element("span", { class: "number" }, percent(share)), ...lead];
}

/** Filled to the least share, lighter to the most. */
function bar([low, high]) {
  const [least, most] = [low, high].map((share) => `${100 * Math.min(share, 1)}%`);
  return drawing(
    "svg",
    { class: "bar", "aria-hidden": "true" },
    drawing("rect", { class: "most", width: most, height: "100%" }),
    drawing("rect", { class: "least", width: least, height: "100%" }),
  );
}

function proof(pieces) {
  const noun = element("span", { class: "unseen" }, pieces === 1 ? " piece of evidence" : " pieces of evidence");
  return element("span", { class: "proven" }, `✓ ${count(pieces)}`, noun);
}

function mark(proven) {
  return element("strong", { class: proven ? "mark proven" : "mark unproven" }, proven ? "proven" : "UNPROVEN");
}

function losers(lost) {
  const items = lost.map(({ backend, reasons, refuses }) =>
    element("li", {}, element("strong", {}, backend), refuses ? " cannot run here: " : ": ", reasons.join("; ")),
  );
  const summary = element("summary", {}, `Why not ${counted(lost.length, "other")}`);
  return element("details", {}, summary, element("ul", {}, ...items));
}
