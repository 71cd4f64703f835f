// The trajectories of a run, with filters and sorting. Each row opens one trajectory.

import * as api from "../api.js";
import { between, select, valuesOf } from "../components/filter_fields.js";
import { empty, fillWith } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { toastProblem } from "../components/toast.js";
import { h, replace } from "../dom.js";
import { number, plural, whole } from "../format.js";
import { recording } from "../recording.js";

const PAGE = 50;
const FILTERS = [
  "first_step", "last_step", "min_score", "max_score", "min_kl", "max_kl",
  "min_response_tokens", "max_response_tokens", "finished", "text", "sort",
];
const SORTS = [
  ["", "step and prompt"],
  ["-score", "highest reward"],
  ["score", "lowest reward"],
  ["-kl", "highest KL"],
  ["kl", "lowest KL"],
  ["-response_tokens", "longest"],
  ["response_tokens", "shortest"],
];

/** Draw the page; `signal` ends it. */
export async function trajectoriesPage({ frame, run, element, query, signal }) {
  const wanted = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]).filter(([, value]) => value));
  const step = query.get("step");
  if (step) Object.assign(wanted, { first_step: step, last_step: step });
  // Without filters, show the newest step.
  const newest = !recording && !Object.keys(wanted).some((name) => name !== "sort") && frame.detail.step;
  const request = newest ? { ...wanted, step: newest } : wanted;
  const list = h("div", { class: "panel" });
  const more = h("button", { class: "button", type: "button", hidden: true }, "More");
  const summary = h("span", { class: "muted small" });
  const shown = [];
  let cursor = null;

  const read = async () => {
    const page = await api.trajectories(run, { ...request, limit: PAGE, cursor }, signal);
    shown.push(...page.items);
    cursor = page.next;
    more.hidden = !cursor;
    const total = Math.max(page.total ?? 0, shown.length);
    replace(summary, `${shown.length < total ? `${whole(shown.length)} of ` : ""}${plural(total, "response")}${searchedSteps(request)}`);
    return drawn(frame, shown, wanted);
  };
  more.addEventListener("click", async () => {
    more.disabled = true;
    try {
      replace(list, await read());
    } catch (problem) {
      if (problem.status >= 0) toastProblem(problem);
      else if (problem.name !== "AbortError") throw problem;
    }
    more.disabled = false;
  });
  replace(
    element,
    h("div", { class: "page-head" }, h("h2", {}, "Trajectories"), summary),
    filterForm(frame, wanted),
    list,
    h("p", { class: "state" }, more),
  );
  await fillWith(list, read, signal);
}

function searchedSteps(request) {
  if (recording) return " in this report: from the best to the worst of the first and of the last step";
  if (request.step) return ` of the newest step, ${whole(request.step)}; filters search the last 50 steps`;
  return request.first_step || request.last_step ? "" : " of the last 50 steps; set steps to search earlier ones";
}

function filterForm(frame, wanted) {
  const apply = (event) => {
    event.preventDefault();
    location.hash = frame.address("trajectories", valuesOf(form));
  };
  const form = h(
    "form",
    { class: "panel filters", "aria-label": "Filters", onsubmit: apply },
    between("Steps", ["first_step", "last_step"], wanted, { min: 1, step: 1, "data-filter": true }),
    between("Reward", ["min_score", "max_score"], wanted),
    between("KL, nats", ["min_kl", "max_kl"], wanted),
    between("Tokens", ["min_response_tokens", "max_response_tokens"], wanted, { min: 0, step: 1 }),
    select("finished", "Finish reason", [["", "any"], ["true", "end token"], ["false", "token limit"]], wanted.finished),
    h(
      "div",
      { class: "field" },
      h("label", { for: "filter-text" }, "Text"),
      h("input", { id: "filter-text", name: "text", type: "search", value: wanted.text ?? "", maxlength: 200, style: { width: "150px" } }),
    ),
    select("sort", "Order", SORTS, wanted.sort),
    h(
      "div",
      { class: "actions" },
      h("a", { class: "button", href: frame.address("trajectories") }, "Clear"),
      h("button", { class: "button primary", type: "submit" }, "Apply"),
    ),
  );
  return form;
}

function drawn(frame, rows, wanted) {
  if (!rows.length) {
    return Object.keys(wanted).length
      ? empty("No matching response", "Change the filters or the range of steps.")
      : empty("No responses yet", "Responses appear here after the first committed step.");
  }
  const address = (row) => frame.address(`trajectories/${row.id.split("/").slice(-3).join("/")}`);
  const sorted = (key) => ({
    by: wanted.sort === key ? "ascending" : wanted.sort === `-${key}` ? "descending" : null,
    onclick: () => (location.hash = frame.address("trajectories", { ...wanted, sort: wanted.sort === `-${key}` ? key : `-${key}` })),
  });
  return table({
    caption: "Responses",
    rows,
    href: address,
    columns: [
      { label: "Step / prompt", head: true, cell: (row) => h("a", { href: address(row) }, `${row.step} / ${row.prompt_index}${row.sample ? `.${row.sample}` : ""}`) },
      { label: "Reward", number: true, sort: sorted("score"), cell: (row) => number(row.score) },
      { label: "KL", number: true, sort: sorted("kl"), cell: (row) => number(row.kl) },
      { label: "Tokens", number: true, sort: sorted("response_tokens"), cell: (row) => whole(row.response_tokens) },
      { label: "Finish reason", kind: "whole", cell: (row) => (row.finished ? "end token" : h("span", { class: "warn" }, "token limit")) },
      { label: "Prompt", clip: true, kind: "wide-text", cell: (row) => h("span", { title: row.prompt.slice(0, 600) }, row.prompt.slice(-160)) },
      { label: "Response", clip: true, kind: "wide-text", cell: (row) => h("span", { title: row.response.slice(0, 600) }, row.response.slice(0, 240)) },
    ],
  });
}
