// The checkpoints of a run, and rollback.

import * as api from "../api.js";
import { confirm } from "../components/dialog.js";
import { empty, fillWith } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { toast, toastProblem } from "../components/toast.js";
import { h, replace } from "../dom.js";
import { ago, bytes, moment, plural, whole } from "../format.js";
import { icon } from "../icons.js";

/** Draw the page; `signal` ends it. */
export async function checkpointsPage({ frame, run, element, signal }) {
  const list = h("div", { class: "panel" });
  const read = (keep) =>
    fillWith(
      list,
      async () => drawn(frame, await api.checkpoints(run, signal)),
      signal,
      keep,
    );
  const command = frame.mayCommand && frame.detail.live;
  replace(
    element,
    h(
      "div",
      { class: "page-head" },
      h("h2", {}, "Checkpoints"),
      h(
        "div",
        { class: "end" },
        command ? h("button", { class: "button", type: "button", onclick: () => frame.controls.send("checkpoint") }, icon("save"), "Checkpoint now") : null,
      ),
    ),
    list,
    command || !frame.mayCommand ? null : h("p", { class: "muted small", style: { "margin-top": "10px" } }, `The run is not active. Roll it back with quartet rollback ${run} STEP, then continue with quartet train --resume.`),
  );
  frame.events.on("checkpoint", () => read(true), signal);
  await read(false);
}

function drawn(frame, rows) {
  if (!rows.length) return empty("No checkpoints", "A checkpoint is saved every ", h("code", {}, "checkpoint.every_steps"), " steps, and on request.");
  return table({
    caption: "Checkpoints, newest first",
    rows: [...rows].sort((a, b) => b.step - a.step),
    columns: [
      { label: "Step", head: true, cell: (row) => whole(row.step) },
      { label: "Tags", cell: (row) => row.tags.join(", ") || h("span", { class: "muted" }, "–") },
      { label: "Saved", cell: (row) => h("time", { title: moment(row.created) }, ago(row.created)) },
      { label: "Size", number: true, cell: (row) => bytes(row.bytes) },
      { label: "State", cell: (row) => (row.problem ? h("span", { class: "bad" }, row.problem) : h("span", { class: "good" }, "complete")) },
      { label: h("span", { class: "unseen" }, "Actions"), number: true, cell: (row) => rollBackButton(frame, row) },
    ],
  });
}

function rollBackButton(frame, { step, problem }) {
  if (!frame.mayCommand || !frame.detail.live || problem) return null;
  const later = () => Math.max(0, frame.detail.step - step);
  const onclick = async () => {
    const text = [
      h("p", {}, `The last ${plural(later(), "step")} of the run ${later() === 1 ? "is" : "are"} discarded, and training continues from step ${whole(step)}.`),
      h("p", { class: "muted" }, "The metrics, trajectories and checkpoints of those steps are deleted. This cannot be undone."),
    ];
    if (!(await confirm(`Roll back to step ${whole(step)}?`, text, { verb: "Roll back", danger: true }))) return;
    try {
      toast((await api.rollBack(frame.run, step)).detail);
    } catch (error) {
      toastProblem(error);
    }
  };
  return h("button", { class: "button", type: "button", onclick, "aria-label": `Roll back to step ${step}` }, "Roll back");
}
