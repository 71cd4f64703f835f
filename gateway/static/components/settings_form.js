// Settings that can be changed while a run goes on: bounds beside each, a question before, errors beside the field.

import * as api from "../api.js";
import { freshId, h, replace } from "../dom.js";
import { exact } from "../format.js";
import { confirm } from "./dialog.js";
import { toast, toastProblem } from "./toast.js";

const MEANING = {
  kl_coefficient: "KL coefficient β",
  "actor.learning_rate": "Actor's learning rate",
  "critic.learning_rate": "Critic's learning rate",
};

/** `settings`: SettingInfo each. Calls `done(answer)` with the settings after a change. */
export function settingsForm(run, settings, mayCommand, done) {
  const rows = settings.map((setting) => row(setting, mayCommand));
  const send = async (event) => {
    event.preventDefault();
    rows.forEach((item) => item.blame(""));
    const changed = rows.filter((item) => item.changed());
    if (!changed.length) return toast("Nothing is changed yet: enter another value first.", "bad");
    const wrong = changed.filter((item) => !item.valid());
    if (wrong.length) return wrong[0].input.focus();
    if (!(await ask(changed))) return;
    try {
      const answer = await api.changeSettings(run, Object.fromEntries(changed.map((item) => [item.setting.name, item.value()])));
      toast(`Changed: ${changed.map((item) => `${MEANING[item.setting.name]} is now ${exact(item.value())}`).join("; ")}.`);
      done(answer);
    } catch (problem) {
      if (!(problem.status >= 0)) throw problem;
      const known = problem.fields.filter((field) => changed.some((item) => field.field.endsWith(item.setting.name)));
      for (const field of known) changed.find((item) => field.field.endsWith(item.setting.name)).blame(field.problem);
      if (!known.length) toastProblem(problem);
    }
  };
  return h(
    "form",
    { onsubmit: send, novalidate: true },
    rows.map((item) => item.element),
    mayCommand
      ? h("div", { class: "dialog-end", style: { "margin-top": "12px" } }, h("button", { class: "button", type: "reset" }, "Reset"), h("button", { class: "button primary", type: "submit" }, "Change …"))
      : h("p", { class: "muted small", style: { "margin-top": "10px" } }, "Your token may read, not change."),
  );
}

function ask(changed) {
  return confirm(
    changed.length > 1 ? "Change these settings?" : "Change this setting?",
    [
      h("dl", { class: "facts" }, changed.map(({ setting, value }) => [h("dt", {}, MEANING[setting.name]), h("dd", {}, `${exact(setting.value)} → `, h("b", {}, exact(value())))])),
      h("p", { class: "muted small" }, "They hold from the first step that has not begun, and are written down with your access and address."),
    ],
    { verb: "Change" },
  );
}

function row(setting, mayCommand) {
  const [id, bounds, problem] = [freshId("setting"), freshId("bounds"), freshId("problem")];
  const { name, value: now, low, high } = setting;
  const input = h("input", { id, name, type: "text", inputmode: "decimal", autocomplete: "off", value: exact(now), disabled: !mayCommand, "aria-describedby": `${bounds} ${problem}` });
  input.defaultValue = exact(now);
  const said = h("span", { id: problem, class: "problem" });
  const item = {
    setting,
    input,
    value: () => Number(input.value.trim()),
    changed: () => input.value.trim() !== exact(now) && !(input.value.trim() !== "" && Number(input.value) === now),
    blame(text) {
      replace(said, text);
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    },
    valid() {
      const found = item.value();
      const fine = input.value.trim() !== "" && Number.isFinite(found) && found >= low && found <= high;
      item.blame(fine ? "" : `Expected a number from ${exact(low)} to ${exact(high)}.`);
      return fine;
    },
  };
  item.element = h(
    "div",
    { class: "setting" },
    h("label", { for: id }, MEANING[name] ?? name),
    input,
    h("span", { id: bounds, class: "muted small" }, `${exact(low)} to ${exact(high)}`),
    said,
  );
  return item;
}
