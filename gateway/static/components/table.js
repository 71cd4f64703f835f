// Tables with a caption for screen readers, horizontal scrolling, and optionally clickable rows.

import { h } from "../dom.js";

/**
 * `columns` holds {label, cell(row) -> node or text, number, clip, head, sort} objects. `label` may be a node; `head` marks the column
 * that names the row; `sort` is {by: "ascending" | "descending" | null, onclick}. A click on a row opens `href(row)` or calls
 * `onrow(row)`; the row must also contain a link for keyboard users. `chosen(row)` highlights rows; `short` limits the height.
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
  // Clicks on controls and text selections must not open the row.
  if (event.target.closest("a, button, input, label") || String(getSelection())) return;
  open();
}

/** Return a list of labels and values. */
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.filter(([, value]) => value !== null && value !== undefined).map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]),
  );
}
