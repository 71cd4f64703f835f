// Short notifications at the edge of the window, which screen readers announce.

import { h } from "../dom.js";
import { icon } from "../icons.js";

const DURATION_MS = { good: 6000, bad: 15000 };

/** Show a notification; `tone` is good or bad. It stays while the pointer is over it. */
export function toast(text, tone = "good") {
  const close = h(
    "button",
    { class: "button bare", type: "button", "aria-label": "Dismiss", onclick: () => item.remove() },
    icon("cross", 14),
  );
  const item = h("div", { class: "toast", "data-tone": tone }, h("div", {}, text), close);
  let timer = setTimeout(() => item.remove(), DURATION_MS[tone]);
  item.addEventListener("pointerenter", () => clearTimeout(timer));
  item.addEventListener("pointerleave", () => {
    timer = setTimeout(() => item.remove(), 3000);
  });
  document.getElementById("toasts").append(item);
}

/** Show the error of a request. */
export function toastProblem(problem) {
  toast([problem.message, ...(problem.fields ?? []).map((field) => `${field.field}: ${field.problem}`)].join("\n"), "bad");
}
