// Tables: a caption for screen readers, a frame that scrolls sideways, rows that open something.

import { h } from "../dom.js";

/**
 * `columns`: {label, cell(row) -> node or text, number, clip, head, sort}. `label` may be a node; `head` marks the column that
 * names the row; `sort` is {by: "ascending" | "descending" | null, onclick}. `href(row)` or `onrow(row)` is where a click anywhere
 * in a row leads: the row must hold a link of its own for the keyboard. `chosen(row)` marks rows; `short`: long ones scroll.
 */
export function table({ caption, columns, rows, href, onrow, chosen, short = false }) {
  const head = columns.map((column) =>
    h(
      "th",
      { scope: "col", class: column.number ? "number" : null, "aria-sort": column.sort ? column.sort.by ?? "none" : null },
      column.sort ? h("button", { type: "button", onclick: column.sort.onclick }, column.label, arrow(column.sort.by)) : column.label,
    ),
  );
  const body = rows.map((row) => {
    const cells = columns.map((column) =>
      h(column.head ? "th" : "td", { scope: column.head ? "row" : null, class: classOf(column) }, column.cell(row)),
    );
    const open = href ? () => (location.hash = href(row)) : onrow ? () => onrow(row) : null;
    return h(
      "tr",
      { class: [open ? "opens" : "", chosen?.(row) ? "chosen" : ""].join(" ").trim() || null, onclick: open && ((event) => follow(event, open)) },
      cells,
    );
  });
  return h(
    "div",
    { class: short ? "scroll short" : "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

function classOf(column) {
  return [column.number ? "number" : "", column.clip ? "clip" : "", column.kind ?? ""].join(" ").trim() || null;
}

function arrow(by) {
  return by === "ascending" ? " ↑" : by === "descending" ? " ↓" : "";
}

function follow(event, open) {
  // Links, boxes and selected text keep what they do by themselves.
  if (event.target.closest("a, button, input, label") || String(getSelection())) return;
  open();
}

/** Label and value, one below the other. */
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.filter(([, value]) => value !== null && value !== undefined).map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]),
  );
}
