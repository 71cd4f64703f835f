// Fields of filter forms. Filters are part of the address, so that a list can be shared as a link.

import { freshId, h } from "../dom.js";

function numberField(name, label, value, attributes = {}) {
  return h("input", { name, type: "number", step: "any", value: value ?? "", "aria-label": label, ...attributes });
}

/** Return two number fields, from and to, under one label; `wanted` holds their values by name. */
export function between(label, [low, high], wanted, attributes = {}) {
  return h(
    "div",
    { class: "field", role: "group", "aria-label": label },
    h("span", { class: "label" }, label),
    h(
      "div",
      { class: "between" },
      numberField(low, `${label}, at least`, wanted[low], { placeholder: "from", ...attributes }),
      h("span", { class: "muted", "aria-hidden": "true" }, "–"),
      numberField(high, `${label}, at most`, wanted[high], { placeholder: "to", ...attributes }),
    ),
  );
}

/** Return a labelled select field; `options` holds [value, text] pairs. */
export function select(name, label, options, value) {
  const id = freshId(name);
  const list = h("select", { id, name }, options.map(([key, text]) => h("option", { value: key, selected: key === (value ?? "") }, text)));
  return h("div", { class: "field" }, h("label", { for: id }, label), list);
}

/** Return the values of a form without empty fields. */
export function valuesOf(form) {
  return Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== "").map(([name, value]) => [name, value]));
}
