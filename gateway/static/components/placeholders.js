// Placeholders of a page: while it loads, if it is empty, or after an error.

import { h, replace } from "../dom.js";
import { icon } from "../icons.js";

/** Return a loading indicator. `height` reserves the space of the content. */
export function loading(height = "220px") {
  return h("div", { class: "state waiting", style: { "min-height": height } }, h("span", { class: "unseen" }, "Loading"));
}

/** Return a message for an empty list. */
export function empty(title, ...explanation) {
  return h("div", { class: "state" }, h("strong", {}, title), explanation.length ? h("p", {}, ...explanation) : null);
}

/** Return an error message, with a button to retry if `retry` is given. */
export function failure(problem, retry) {
  return h(
    "div",
    { class: "state error", role: "alert" },
    icon("warn", 22),
    h("strong", {}, problem.status === 404 ? "Not found" : problem.status ? "Request failed" : "No response"),
    h("p", {}, problem.message),
    (problem.fields ?? []).map((field) => h("p", {}, h("code", {}, field.field), ` ${field.problem}`)),
    retry ? h("button", { class: "button", type: "button", onclick: retry }, icon("again"), "Try again") : null,
  );
}

/**
 * Fill `element` with the result of `load`. Show a loading indicator first, and an error with a retry button if it fails. With
 * `keep`, the current content stays until the result arrives. Return whether it succeeded. A result after `signal` is ignored.
 */
export async function fillWith(element, load, signal, keep = false) {
  if (!keep || !element.hasChildNodes()) replace(element, loading());
  try {
    const content = await load();
    if (!signal?.aborted) replace(element, content);
    return true;
  } catch (problem) {
    if (signal?.aborted || problem.name === "AbortError") return false;
    if (!(problem.status >= 0)) throw problem;
    replace(
      element,
      failure(problem, () => fillWith(element, load, signal)),
    );
    return false;
  }
}
