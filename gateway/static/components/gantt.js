// The timeline of a step: one row per service with coloured work, hatched idle time and an outlined critical path.

import { h, s, write } from "../dom.js";
import { percent, seconds } from "../format.js";
import { criticalPath, gaps, isWork, lengthOf, servicesOf, union } from "../timeline_analysis.js";

const COLOURS = {
  generate: "blue",
  evaluate: "blue",
  publish: "pink",
  update_weights: "pink",
  score: "green",
  log_probs: "yellow",
  values: "pink",
  update: "orange",
  checkpoint: "pink",
};
const ROW = 34;
const BAR = 20;
/** Height of the lane of devices below a bar. */
const LANE = 6;
const TOP = 6;
/** Mean width of a character of the labels, in pixels. */
const CHARACTER = 6.6;

/** Return the CSS variable with the colour of a phase. */
export const colourOf = (phase) => `var(--${COLOURS[phase] ?? "grey"})`;

/**
 * Return the timeline for a width in pixels, followed by a line of text about the span under the pointer. Below the work of a service
 * that has samples of its `devices`, a lane shows how busy they were.
 */
export function gantt(spans, width, devices = []) {
  const names = servicesOf(spans);
  const length = lengthOf(spans);
  const left = labelWidth(names, width);
  const height = TOP + names.length * ROW + 24;
  const x = (time) => left + (time / length) * (width - left - 12);
  const linked = new Set(criticalPath(spans).map((link) => link.span).filter(Boolean));
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const rest = "Point at a span, or select it with Tab and the arrow keys, to see its details.";
  write(readout, rest);
  const drawing = s(
    "svg",
    { class: "gantt", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Timeline of the step: ${seconds(length)} in total` },
    s("defs", {}, idlePattern()),
    axis(length, x, height),
  );
  const bars = [];
  names.forEach((name, row) => {
    const y = TOP + row * ROW;
    const own = spans.filter((span) => span.service === name);
    drawing.append(s("text", { x: 0, y: y + ROW / 2 + 4 }, shortened(name, left), s("title", {}, name)));
    for (const [start, end] of gaps(union(own.filter(isWork)), length)) {
      drawing.append(s("rect", { class: "idle", x: x(start), y: y + 7, width: Math.max(0.5, x(end) - x(start)), height: BAR }));
    }
    const samples = devices.find(({ service }) => service === name)?.samples ?? [];
    if (samples.length) drawing.append(deviceLane(samples, x, y + 7 + BAR + 1, length));
    for (const span of own.filter(isWork)) bars.push(bar(span, linked.has(span), x, y, length, readout, rest));
  });
  drawing.append(...bars);
  enableArrowKeys(bars);
  return h("div", {}, h("div", { class: "scroll" }, drawing), readout);
}

/** Return a lane whose height is the use of the devices. Each sample covers the time since the one before it. */
function deviceLane(samples, x, y, length) {
  const [busy, power] = [1, 3].map((field) => mean(samples.map((sample) => sample[field]).filter((value) => value !== null)));
  const about = [busy === null ? "" : `${percent(busy)} busy`, power === null ? "" : `${Math.round(power)} W`].filter(Boolean).join(", ");
  const lane = s("g", { class: "device-lane", role: "img", "aria-label": `devices: ${about || "no readings"}` }, s("title", {}, `devices: ${about}`));
  samples.forEach(([at, share], index) => {
    const start = index ? samples[index - 1][0] : Math.max(0, at - 1);
    const end = Math.min(at, length);
    if (share === null || end <= start) return;
    const height = Math.max(0.5, share * LANE);
    lane.append(s("rect", { x: x(start), y: y + LANE - height, width: x(end) - x(start), height }));
  });
  return lane;
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** Return the width of the service names in pixels: as wide as the longest, up to a quarter of the drawing. */
function labelWidth(names, width) {
  const longest = Math.max(0, ...names.map((name) => name.length)) * CHARACTER + 10;
  return Math.max(width < 500 ? 78 : 96, Math.min(longest, width / 4));
}

/** Return a name that fits `width`: of a generator, the address, whose end tells it from the others. */
function shortened(full, width) {
  const room = Math.floor((width - 10) / CHARACTER);
  const name = full.length > room ? full.split(" ").at(-1) : full;
  return name.length > room ? `…${name.slice(1 - room)}` : name;
}

function bar(span, linked, x, y, length, readout, rest) {
  const calls = span.count > 1 ? `, ${span.count} calls` : "";
  const text =
    `${span.service}: ${span.phase}, ${seconds(span.end - span.start)} (${percent((span.end - span.start) / length)} of the step), ` +
    `from ${seconds(span.start)} to ${seconds(span.end)}${calls}${linked ? ", on the critical path" : ""}`;
  const showDetails = () => write(readout, text);
  const hideDetails = () => write(readout, rest);
  const width = Math.max(1.2, x(span.end) - x(span.start));
  const rect = s("rect", {
    class: `span${linked ? " chain-span" : ""}`,
    x: x(span.start),
    y: y + 7,
    width,
    height: BAR,
    rx: Math.min(3, width / 3),
    tabindex: -1,
    role: "img",
    "aria-label": text,
    onpointerenter: showDetails,
    onpointerleave: hideDetails,
    onfocus: showDetails,
    onblur: hideDetails,
  });
  rect.style.fill = colourOf(span.phase);
  if (linked) {
    rect.style.stroke = "var(--text)";
    rect.style.strokeWidth = "1.6px";
  }
  return rect;
}

/** Make one span reachable with Tab; the arrow keys move between spans. */
function enableArrowKeys(bars) {
  if (!bars.length) return;
  bars[0].setAttribute("tabindex", "0");
  bars.forEach((current, at) =>
    current.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = bars[at + (move ?? 0)];
      if (!move || !next) return;
      event.preventDefault();
      current.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    }),
  );
}

function idlePattern() {
  return s(
    "pattern",
    { id: "idle-pattern", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("line", { class: "idle-line", x1: 0, y1: 0, x2: 0, y2: 6 }),
  );
}

function axis(length, x, height) {
  const step = niceStep(length / 5);
  const group = s("g", { class: "axis", "aria-hidden": "true" });
  for (let time = 0; time <= length * 1.0001; time += step) {
    group.append(s("line", { class: "grid", x1: x(time), x2: x(time), y1: TOP, y2: height - 20 }));
    const anchor = time === 0 ? "start" : x(time) > x(length) - 20 ? "end" : "middle";
    group.append(s("text", { x: x(time), y: height - 5, "text-anchor": anchor }, time === 0 ? "0" : seconds(time)));
  }
  return group;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
}

/** Return the legend of the phases that occur. */
export function ganttKeys(spans, devices = []) {
  const phases = [...new Set(spans.filter(isWork).map((span) => span.phase))];
  const own = phases.filter((phase) => COLOURS[phase]);
  const rest = phases.filter((phase) => !COLOURS[phase]);
  return h(
    "div",
    { class: "keys" },
    own.map((phase) => h("span", {}, h("i", { style: { "--key": colourOf(phase) } }), phase.replaceAll("_", "-"))),
    rest.length ? h("span", {}, h("i", { style: { "--key": "var(--grey)" } }), rest.join(", ")) : null,
    h("span", {}, h("i", { class: "idle" }), "idle"),
    h("span", {}, h("i", { class: "chain" }), "on the critical path"),
    devices.length ? h("span", {}, h("i", { style: { "--key": "var(--muted)" } }), "devices busy") : null,
  );
}
