// Keys, and the dialog that lists them. They can be switched off, for those who speak to their computer.

import { openDialog } from "./components/dialog.js";
import { h } from "./dom.js";
import { toggleTheme } from "./tools.js";

const KEY = "quartet.shortcuts";
const enabled = () => localStorage.getItem(KEY) !== "off";

const LIST = [
  ["1 … 9", "the sections of a run"],
  ["r", "all runs"],
  ["p", "pause or resume the run; asks first"],
  ["/", "the first filter of the page"],
  ["←  →", "in a trajectory: the next lower or higher reward; on a chart: from step to step"],
  ["[  ]", "the step before or after, where a page shows one"],
  ["Esc", "leave a zoom or a dialog"],
  ["t", "dark or light"],
  ["?", "this list"],
];

/** Lists the keys. */
export function showHelp() {
  const box = h("input", {
    type: "checkbox",
    checked: enabled(),
    onchange: () => localStorage.setItem(KEY, box.checked ? "on" : "off"),
  });
  return openDialog("Keys", (close) => [
    h(
      "dl",
      { class: "facts" },
      LIST.map(([keys, meaning]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, meaning)]),
    ),
    h("p", { class: "muted small" }, "Charts: drag to zoom in on steps; double-click or Escape to see all of them again. Every chart can be reached with Tab."),
    h("p", { class: "muted small" }, "Everything here comes from the REST API; its OpenAPI document is at /api/v1/openapi.json."),
    h("label", { class: "check" }, box, "Keyboard shortcuts"),
    h("div", { class: "dialog-end" }, h("button", { class: "button primary", type: "button", onclick: () => close() }, "Close")),
  ]);
}

/** Listens for the keys; `frame()` is the run on show, or null. */
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
  if (key === "?") return showHelp;
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
