// The dialog that starts a run from a config.

import * as api from "../api.js";
import { openDialog } from "../components/dialog.js";
import { freshId, h, replace } from "../dom.js";

const EXAMPLE = {
  run: { name: "my", steps: 200 },
  data: { prompts: "prompts.jsonl" },
  actor: { model: "path-or-hub-id" },
  reward: { model: "path-or-hub-id" },
};

/** Gives the started run's summary, null where none was started. */
export function startRunDialog() {
  return openDialog("Start a run", (close) => content(close), { wide: true });
}

function content(close) {
  const [field, problems] = [freshId("config"), freshId("problems")];
  const area = h("textarea", { id: field, class: "mono", rows: 18, spellcheck: "false", "aria-describedby": problems });
  area.value = JSON.stringify(EXAMPLE, null, 2);
  const resume = h("input", { type: "checkbox" });
  const said = h("div", { id: problems, role: "alert", class: "stack", style: { gap: "4px" } });
  const start = h("button", { class: "button primary", type: "submit" }, "Start");
  const send = async (event) => {
    event.preventDefault();
    replace(said);
    area.removeAttribute("aria-invalid");
    const config = parsed(area.value);
    if (config instanceof Error) return refuse(config.message, []);
    start.disabled = true;
    try {
      close(await api.startRun(config, resume.checked));
    } catch (problem) {
      if (!(problem.status >= 0)) throw problem;
      refuse(problem.message, problem.fields);
    } finally {
      start.disabled = false;
    }
  };
  const refuse = (message, fields) => {
    area.setAttribute("aria-invalid", "true");
    replace(
      said,
      h("p", { class: "bad" }, fields.length ? "The config is refused. Nothing was started." : message),
      fields.map((item) => h("p", { class: "bad small" }, h("code", {}, item.field.replace(/^body\.(config\.)?/, "")), ` ${item.problem}`)),
    );
  };
  return h(
    "form",
    { class: "stack", onsubmit: send },
    h("div", { class: "field" }, h("label", { for: field }, "The config, as JSON: the same tree as in a YAML file"), area),
    h("label", { class: "check" }, resume, "Go on with the run of this name where it broke off"),
    said,
    h("div", { class: "dialog-end" }, h("button", { class: "button", type: "button", onclick: () => close() }, "Cancel"), start),
  );
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : new Error("Expected an object: {\"run\": {…}, …}.");
  } catch (error) {
    return new Error(`This is not JSON: ${error.message}.`);
  }
}
