// Dialogs, as native dialog elements: they keep the focus inside and close with Escape.

import { freshId, h } from "../dom.js";

/** Open a dialog. `content(close)` returns its elements. Resolves to the value given to `close`, or null after Escape. */
export function openDialog(title, content, { wide = false } = {}) {
  return new Promise((resolve) => {
    const label = freshId("dialog");
    const before = document.activeElement;
    let answer = null;
    const close = (value = null) => {
      answer = value;
      dialog.close();
    };
    const dialog = h(
      "dialog",
      { class: wide ? "wide" : null, "aria-labelledby": label },
      h("div", { class: "dialog-body" }, h("h2", { id: label }, title), content(close)),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Ask for confirmation. Resolves to true if the user agrees. `danger` marks an action that cannot be undone. */
export function confirm(title, explanation, { verb, danger = false }) {
  return openDialog(title, (close) => [
    h("div", { class: "stack" }, explanation),
    h(
      "div",
      { class: "dialog-end" },
      h("button", { class: "button", type: "button", onclick: () => close(false) }, "Cancel"),
      h(
        "button",
        { class: `button ${danger ? "danger" : "primary"}`, type: "button", autofocus: !danger, onclick: () => close(true) },
        verb,
      ),
    ),
  ]);
}
