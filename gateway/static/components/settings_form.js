// A form for the settings that can be changed during training, with bounds, confirmation and errors beside each field.

import * as api from "../api.js";
import { freshId, h, replace } from "../dom.js";
import { exact, words } from "../format.js";
import { confirm } from "./dialog.js";
import { toast, toastProblem } from "./toast.js";

const label = (name) => words(name).replaceAll(".", " ");

/** Form for `settings`, a list of Setting objects. Calls `done(answer)` with the settings after a change. */
export function settingsForm(run, settings, mayCommand, done) {
  const rows = settings.map((setting) => row(setting, mayCommand));
  const send = async (event) => {
    event.preventDefault();
    rows.forEach((item) => item.setProblem(""));
    const changed = rows.filter((item) => item.changed());
    if (!changed.length) return toast("No value was changed. Enter a new value first.", "bad");
    const wrong = changed.filter((item) => !item.valid());
    if (wrong.length) return wrong[0].input.focus();
    if (!(await confirmChanges(changed))) return;
    try {
      const answer = await api.changeSettings(run, Object.fromEntries(changed.map((item) => [item.setting.name, item.value()])));
      toast(`Changed: ${changed.map((item) => `${label(item.setting.name)} is now ${exact(item.value())}`).join("; ")}.`);
      done(answer);
    } catch (problem) {
      if (!(problem.status >= 0)) throw problem;
      const known = problem.fields.filter((field) => changed.some((item) => field.field.endsWith(item.setting.name)));
      for (const field of known) changed.find((item) => field.field.endsWith(item.setting.name)).setProblem(field.problem);
      if (!known.length) toastProblem(problem);
    }
  };
  return h(
    "form",
    { onsubmit: send, novalidate: true },
    rows.map((item) => item.element),
    mayCommand
      ? h("div", { class: "dialog-end", style: { "margin-top": "12px" } }, h("button", { class: "button", type: "reset" }, "Reset"), h("button", { class: "button primary", type: "submit" }, "Change …"))
      : h("p", { class: "muted small", style: { "margin-top": "10px" } }, "This token is read-only."),
  );
}

function confirmChanges(changed) {
  return confirm(
    changed.length > 1 ? "Change these settings?" : "Change this setting?",
    [
      h("dl", { class: "facts" }, changed.map(({ setting, value }) => [h("dt", {}, label(setting.name)), h("dd", {}, `${exact(setting.value)} → `, h("b", {}, exact(value())))])),
      h("p", { class: "muted small" }, "The new values apply from the next step that has not started. The audit log records your access and address."),
    ],
    { verb: "Change" },
  );
}

function row(setting, mayCommand) {
  const [id, bounds, problem] = [freshId("setting"), freshId("bounds"), freshId("problem")];
  const { name, value: now, low, high } = setting;
  const input = h("input", { id, name, type: "text", inputmode: "decimal", autocomplete: "off", value: exact(now), disabled: !mayCommand, "aria-describedby": `${bounds} ${problem}` });
  input.defaultValue = exact(now);
  const problemText = h("span", { id: problem, class: "problem" });
  const item = {
    setting,
    input,
    value: () => Number(input.value.trim()),
    changed: () => input.value.trim() !== exact(now) && !(input.value.trim() !== "" && Number(input.value) === now),
    setProblem(text) {
      replace(problemText, text);
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    },
    valid() {
      const entered = item.value();
      const valid = input.value.trim() !== "" && Number.isFinite(entered) && entered >= low && entered <= high;
      item.setProblem(valid ? "" : `Enter a number from ${exact(low)} to ${exact(high)}.`);
      return valid;
    },
  };
  item.element = h(
    "div",
    { class: "setting" },
    h("label", { for: id }, label(name)),
    input,
    h("span", { id: bounds, class: "muted small" }, `${exact(low)} to ${exact(high)}`),
    problemText,
  );
  return item;
}
