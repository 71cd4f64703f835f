// Guards: their alerts with remedies, failed trajectories, and their settings.

import * as api from "../api.js";
import { actionPill } from "../components/state_pill.js";
import { empty, fillWith } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { h, replace } from "../dom.js";
import { exact, plural, whole, words } from "../format.js";
import { icon } from "../icons.js";

/** Draw the page; `signal` ends it. */
export async function guardsPage({ frame, run, element, signal }) {
  const body = h("div", { class: "stack" });
  replace(element, h("div", { class: "page-head" }, h("h2", {}, "Guards")), body);
  const read = (keep) =>
    fillWith(
      body,
      async () => {
        const [guards, failed] = await Promise.all([api.guards(run, signal), api.failedTrajectories(run, { limit: 50 }, signal)]);
        return [alerts(frame, guards.alerts), failedTrajectories(frame, failed), settings(guards.settings)];
      },
      signal,
      keep,
    );
  frame.events.on("alert", () => read(true), signal);
  await read(false);
}

function alerts(frame, items) {
  if (!items.length) {
    return h("section", { class: "panel" }, h("h3", {}, "Alerts"), empty("No alerts", "The guards check every committed step."));
  }
  const kinds = new Map();
  for (const alert of items) kinds.set(alert.guard, [...(kinds.get(alert.guard) ?? []), alert]);
  return h(
    "section",
    { class: "stack", "aria-label": "Alerts" },
    [...kinds.values()].map(([alert, ...before]) =>
      h(
        "article",
        { class: "card", "data-tone": alert.action === "stop" ? "bad" : "warn" },
        h("div", { class: "card-head" }, h("h3", {}, words(alert.guard)), h("span", { class: "small" }, h("a", { href: frame.address("steps", { step: alert.step }) }, `step ${whole(alert.step)}`), " ", actionPill(alert.action))),
        h("p", {}, alert.evidence),
        h("p", { class: "muted" }, h("b", {}, "Remedy: "), alert.remedy),
        h("p", { class: "small" }, h("a", { href: frame.address("trajectories", { step: alert.step, sort: "-score" }) }, "Responses of this step, by reward")),
        before.length ? earlier(frame, before) : null,
      ),
    ),
  );
}

function earlier(frame, before) {
  return h(
    "details",
    { class: "small" },
    h("summary", {}, `${plural(before.length, "earlier alert")}`),
    h("ul", { class: "stack", style: { gap: "4px", "padding-top": "6px" } }, before.map((alert) => h("li", {}, h("a", { href: frame.address("steps", { step: alert.step }) }, `step ${whole(alert.step)}`), `: ${alert.evidence}`))),
  );
}

function failedTrajectories(frame, page) {
  const rows = page.items;
  if (!rows.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h3", {}, `Failed trajectories: ${plural(page.total ?? rows.length, "response")} that could not be scored`),
    table({
      caption: "Responses that could not be scored",
      rows,
      columns: [
        { label: "Step", head: true, cell: (row) => h("a", { href: frame.address("steps", { step: row.step }) }, whole(row.step)) },
        { label: "Outcome", cell: (row) => (row.outcome ? words(row.outcome) + (row.prompt_skipped ? ", prompt skipped" : "") : "–") },
        { label: "Attempts", number: true, cell: (row) => whole(row.attempts) },
        { label: "Error", cell: (row) => row.error },
        { label: "Response", clip: true, kind: "wide-text", cell: (row) => row.response ?? "–" },
      ],
    }),
  );
}

function settings(tree) {
  const rules = Object.entries(tree).filter(([, value]) => value !== null && typeof value === "object");
  const others = Object.entries(tree).filter(([, value]) => value === null || typeof value !== "object");
  return h(
    "section",
    { class: "panel" },
    h("h3", {}, "Settings", h("span", { class: "muted small" }, others.map(([name, value]) => ` · ${words(name)} ${exact(value)}`))),
    table({
      caption: "Settings of the guards",
      rows: rules,
      columns: [
        { label: "Guard", head: true, cell: ([name]) => words(name) },
        { label: "Action", cell: ([, rule]) => (rule.action === "off" ? h("span", { class: "pill" }, icon("circle", 14), "off") : actionPill(rule.action)) },
        {
          label: "Bounds",
          cell: ([, rule]) =>
            Object.entries(rule)
              .filter(([name]) => name !== "action")
              .map(([name, value]) => `${words(name)} ${exact(value)}`)
              .join(", ") || h("span", { class: "muted" }, "none: every occurrence raises an alert"),
        },
      ],
    }),
  );
}
