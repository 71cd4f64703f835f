// The config of a run: settings that can be changed now, past changes, the audit log, and the resolved config.

import * as api from "../api.js";
import { settingsForm } from "../components/settings_form.js";
import { empty, fillWith } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { shown, tree } from "../components/config_tree.js";
import { h, replace } from "../dom.js";
import { exact, moment, whole } from "../format.js";

/** Draw the page; `signal` ends it. */
export async function configPage({ frame, run, element, signal }) {
  const [live, audit, resolved] = [h("div", { class: "stack" }), h("div", {}), h("div", { class: "panel" })];
  replace(element, h("div", { class: "page-head" }, h("h2", {}, "Config")), h("div", { class: "stack" }, live, audit, resolved));
  const readAudit = () => fillWith(audit, async () => audits(await api.audit(run, { limit: 100 }, signal)), signal, true);
  const readSettings = (keep) =>
    fillWith(
      live,
      async () => {
        const answer = await api.settings(run, signal);
        return settings(frame, run, answer, () => (readSettings(true), readAudit()));
      },
      signal,
      keep,
    );
  frame.events.on(
    "change",
    () => {
      // A change by another user must not discard what this user is typing.
      if (!live.contains(document.activeElement)) readSettings(true);
      readAudit();
    },
    signal,
  );
  await Promise.all([
    readSettings(false),
    readAudit(),
    fillWith(resolved, async () => browser(await api.config(run, signal)), signal),
  ]);
}

function settings(frame, run, answer, done) {
  return [
    h(
      "section",
      { class: "panel padded" },
      h("h3", { style: { padding: "0 0 6px" } }, "Live settings"),
      answer.settings.length
        ? settingsForm(run, answer.settings, frame.mayCommand, done)
        : h("p", { class: "muted" }, "No setting can be changed: the run is not active."),
    ),
    answer.changes.length ? h("section", { class: "panel" }, h("h3", {}, "Changes of settings"), changes(answer.changes)) : null,
  ];
}

function changes(rows) {
  return table({
    caption: "Changes of settings, newest first",
    rows: [...rows].reverse(),
    columns: [
      { label: "From step", number: true, cell: (row) => whole(row.step) },
      { label: "Setting", head: true, cell: (row) => row.setting },
      { label: "Before", number: true, cell: (row) => exact(row.before) },
      { label: "After", number: true, cell: (row) => exact(row.after) },
      { label: "User", cell: (row) => row.user },
      { label: "When", cell: (row) => moment(row.at) },
    ],
  });
}

function audits(answer) {
  const rows = api.itemsOf(answer);
  if (!rows.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h3", {}, "Commands"),
    table({
      caption: "Commands, newest first",
      rows,
      columns: [
        { label: "When", cell: (row) => moment(row.at) },
        { label: "Command", head: true, cell: (row) => row.command },
        { label: "Details", cell: (row) => Object.entries(row.details).map(([name, value]) => `${name} ${shown(value)}`).join(", ") || "–" },
        { label: "User", cell: (row) => row.user },
        { label: "Outcome", cell: (row) => h("span", { class: row.outcome === "accepted" ? "good" : "bad" }, row.outcome) },
      ],
    }),
  );
}

function browser({ config, yaml }) {
  const body = h("div", {});
  const search = h("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", "data-filter": true, oninput: () => draw() });
  const draw = () => {
    const wanted = search.value.trim().toLowerCase();
    const drawn = tree(config, wanted ? (path, value) => `${path}: ${shown(value)}`.toLowerCase().includes(wanted) : null);
    replace(body, drawn.hasChildNodes() ? drawn : empty("No matching setting"));
  };
  const copy = h("button", { class: "button", type: "button", onclick: () => copyText(yaml, copy) }, "Copy as YAML");
  draw();
  return [h("div", { class: "page-head", style: { padding: "12px 16px 0", margin: "0" } }, h("h3", {}, "Resolved config"), h("div", { class: "end" }, search, copy)), body];
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not permitted by the browser";
  }
  setTimeout(() => (button.textContent = "Copy as YAML"), 2000);
}

