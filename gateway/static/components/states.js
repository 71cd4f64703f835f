// What a page shows when it has nothing to show yet, nothing at all, or an error.

import { h, replace } from "../dom.js";
import { icon } from "../icons.js";

/** Something is on its way. `height` keeps the place that it will take. */
export function loading(height = "220px") {
  return h("div", { class: "state waiting", style: { "min-height": height } }, h("span", { class: "unseen" }, "Loading"));
}

/** There is nothing, and why. */
export function empty(title, ...explanation) {
  return h("div", { class: "state" }, h("strong", {}, title), explanation.length ? h("p", {}, ...explanation) : null);
}

/** It failed: what the gateway said, and a button to try again. */
export function failure(problem, again) {
  return h(
    "div",
    { class: "state error", role: "alert" },
    icon("warn", 22),
    h("strong", {}, problem.status === 404 ? "Not found" : problem.status ? "That did not work" : "No answer"),
    h("p", {}, problem.message),
    (problem.fields ?? []).map((field) => h("p", {}, h("code", {}, field.field), ` ${field.problem}`)),
    again ? h("button", { class: "button", type: "button", onclick: again }, icon("again"), "Try again") : null,
  );
}

/**
 * Fills `element` with what `load` promises: a waiting sign first, an error with a retry where it fails. With `keep`, what is
 * on show stays until there is something new. Gives whether it worked; an answer that comes after `signal` is dropped.
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
