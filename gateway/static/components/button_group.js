// A row of buttons of which exactly one is pressed.

import { h } from "../dom.js";

/** Button group. `options` holds [value, label] pairs. Calls `onchange(value)`. `set(value)` of the element presses a button without a call. */
export function buttonGroup(label, options, value, onchange) {
  const buttons = new Map();
  const element = h("div", { class: "choice", role: "group", "aria-label": label });
  element.set = (chosen) => {
    for (const [name, button] of buttons) button.setAttribute("aria-pressed", String(name === chosen));
  };
  for (const [name, text] of options) {
    const onclick = () => {
      element.set(name);
      onchange(name);
    };
    const button = h("button", { type: "button", onclick }, text);
    buttons.set(name, button);
    element.append(button);
  }
  element.set(value);
  return element;
}
