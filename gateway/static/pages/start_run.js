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

/** Open the dialog. Resolves to the summary of the started run, or null. */
export function startRunDialog() {
  return openDialog("Start a run", (close) => content(close), { wide: true });
}

function content(close) {
  const [field, problems] = [freshId("config"), freshId("problems")];
  const area = h("textarea", { id: field, class: "mono", rows: 18, spellcheck: "false", "aria-describedby": problems });
  area.value = JSON.stringify(EXAMPLE, null, 2);
  const resume = h("input", { type: "checkbox" });
  const problemList = h("div", { id: problems, role: "alert", class: "stack", style: { gap: "4px" } });
  const start = h("button", { class: "button primary", type: "submit" }, "Start");
  const send = async (event) => {
    event.preventDefault();
    replace(problemList);
    area.removeAttribute("aria-invalid");
    const config = parsed(area.value);
    if (config instanceof Error) return showProblem(config.message, []);
    start.disabled = true;
    try {
      close(await api.startRun(config, resume.checked));
    } catch (problem) {
      if (!(problem.status >= 0)) throw problem;
      showProblem(problem.message, problem.fields);
    } finally {
      start.disabled = false;
    }
  };
  const showProblem = (message, fields) => {
    area.setAttribute("aria-invalid", "true");
    replace(
      problemList,
      h("p", { class: "bad" }, fields.length ? "The config is invalid. No run was started." : message),
      fields.map((item) => h("p", { class: "bad small" }, h("code", {}, item.field.replace(/^body\.(config\.)?/, "")), ` ${item.problem}`)),
    );
  };
  return h(
    "form",
    { class: "stack", onsubmit: send },
    h("div", { class: "field" }, h("label", { for: field }, "Config as JSON, with the same structure as a YAML file"), area),
    h("label", { class: "check" }, resume, "Continue the existing run of this name"),
    problemList,
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
