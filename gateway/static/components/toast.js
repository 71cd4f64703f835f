// Short news at the edge of the window, read aloud by screen readers.

import { h } from "../dom.js";
import { icon } from "../icons.js";

const SHOWN_FOR = { good: 6000, bad: 15000 };

/** Shows a text; `tone` is good or bad. Stays while the pointer is on it. */
export function toast(text, tone = "good") {
  const close = h(
    "button",
    { class: "button bare", type: "button", "aria-label": "Dismiss", onclick: () => item.remove() },
    icon("cross", 14),
  );
  const item = h("div", { class: "toast", "data-tone": tone }, h("div", {}, text), close);
  let timer = setTimeout(() => item.remove(), SHOWN_FOR[tone]);
  item.addEventListener("pointerenter", () => clearTimeout(timer));
  item.addEventListener("pointerleave", () => {
    timer = setTimeout(() => item.remove(), 3000);
  });
  document.getElementById("toasts").append(item);
}

/** Shows what went wrong with a request. */
export function toastProblem(problem) {
  toast([problem.message, ...(problem.fields ?? []).map((field) => `${field.field}: ${field.problem}`)].join("\n"), "bad");
}
