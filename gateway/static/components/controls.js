// What an operator can tell a run: each asks first, and says what came of it.

import * as api from "../api.js";
import { h, replace } from "../dom.js";
import { icon } from "../icons.js";
import { confirm } from "./dialog.js";
import { toast, toastProblem } from "./toast.js";

const COMMANDS = {
  pause: {
    label: "Pause",
    shape: "pause",
    title: "Pause the run?",
    text: "It finishes the step in hand, commits it, and waits. Nothing is lost; the services stay up.",
  },
  resume: { label: "Resume", shape: "play", title: "Resume the run?", text: "It goes on with the next step." },
  checkpoint: {
    label: "Checkpoint",
    shape: "save",
    title: "Save a checkpoint?",
    text: "It is saved after the step in hand, beside those that are kept anyway.",
  },
  stop: {
    label: "Stop",
    shape: "stop",
    title: "Stop the run?",
    text: "It finishes the step in hand, saves its policy, and ends. It can be taken up again with quartet train --resume.",
    danger: true,
  },
};

export class Controls {
  constructor(frame) {
    this.frame = frame;
    this.element = h("div", { class: "run-controls", role: "group", "aria-label": "Controls of the run" });
    this.draw();
  }

  draw() {
    const { detail, mayCommand } = this.frame;
    const verbs = mayCommand && detail.live ? [detail.state === "paused" ? "resume" : "pause", "checkpoint", "stop"] : [];
    const key = verbs.join();
    if (key === this.shown) return;
    this.shown = key;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    replace(
      this.element,
      verbs.map((verb, at) =>
        h(
          "button",
          { class: "button", type: "button", "data-verb": verb, "data-at": at, onclick: () => this.give(verb) },
          icon(COMMANDS[verb].shape),
          COMMANDS[verb].label,
        ),
      ),
    );
    if (focused !== null) this.element.querySelector(`[data-at="${focused}"]`)?.focus();
  }

  /** Asks, then sends a command. */
  async give(verb) {
    const { label, title, text, danger } = COMMANDS[verb];
    if (!(await confirm(title, [h("p", {}, text)], { verb: label, danger }))) return;
    try {
      const { detail } = await api.command(this.frame.run, verb);
      toast(detail);
    } catch (problem) {
      toastProblem(problem);
    }
  }

  /** What the key `p` does. */
  pauseOrResume() {
    const { detail, mayCommand } = this.frame;
    if (mayCommand && detail.live) this.give(detail.state === "paused" ? "resume" : "pause");
  }
}
