// Keyboard shortcuts and the dialog that lists them. They can be disabled, because they interfere with speech input.

import { openDialog } from "./components/dialog.js";
import { h } from "./dom.js";
import { toggleTheme } from "./theme_toggle.js";

const KEY = "quartet.shortcuts";
const enabled = () => localStorage.getItem(KEY) !== "off";

const LIST = [
  ["1 … 9", "open a section of the run"],
  ["r", "open the list of runs"],
  ["p", "pause or resume the run, after confirmation"],
  ["/", "go to the first filter of the page"],
  ["←  →", "in a trajectory: next lower or higher reward; on a chart: previous or next step"],
  ["[  ]", "previous or next step"],
  ["Esc", "close a dialog, or reset the zoom"],
  ["t", "switch between dark and light theme"],
  ["?", "show this list"],
];

/** Open the list of shortcuts. */
export function showShortcuts() {
  const box = h("input", {
    type: "checkbox",
    checked: enabled(),
    onchange: () => localStorage.setItem(KEY, box.checked ? "on" : "off"),
  });
  return openDialog("Keyboard shortcuts", (close) => [
    h(
      "dl",
      { class: "facts" },
      LIST.map(([keys, meaning]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, meaning)]),
    ),
    h("p", { class: "muted small" }, "Charts: drag to zoom in; double-click or press Escape to reset the zoom. Reach every chart with Tab."),
    h("p", { class: "muted small" }, "All data comes from the REST API. Its OpenAPI document is at /api/v1/openapi.json."),
    h("label", { class: "check" }, box, "Enable keyboard shortcuts"),
    h("div", { class: "dialog-end" }, h("button", { class: "button primary", type: "button", onclick: () => close() }, "Close")),
  ]);
}

/** Handle the shortcuts; `frame()` returns the current run, or null. */
export function installShortcuts(frame) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog") || !enabled()) return;
    const act = actionOf(event.key, frame());
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function actionOf(key, frame) {
  if (key === "?") return showShortcuts;
  if (key === "t") return toggleTheme;
  if (key === "r") return () => (location.hash = "#/runs");
  if (key === "p" && frame) return () => frame.controls.pauseOrResume();
  if (frame && /^[1-9]$/.test(key)) return () => frame.open(Number(key) - 1);
  if (key === "/") {
    const field = document.querySelector("main [data-filter]");
    return field ? () => field.focus() : null;
  }
  return null;
}
