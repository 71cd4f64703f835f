// A group of charts over the same steps with a shared crosshair and zoom. Visible charts are redrawn at most twice a second.

import * as charts from "../charts.js";
import { h, replace, announce, write } from "../dom.js";
import { number, whole } from "../format.js";

const MIN_REDRAW_INTERVAL = 500;
const MAX_REDRAW_INTERVAL = 4000;
/** Within these bounds, the interval between redraws is this many times the duration of the last one: the page stays responsive. */
const INTERVAL_FACTOR = 5;

/** Charts over the same steps. Calls `onzoom(start, end)` for another range, and `onzoom(null)` for all steps. */
export class ChartGroup {
  constructor(signal, onzoom) {
    this.onzoom = onzoom;
    this.cards = [];
    this.dirty = new Set();
    this.timer = null;
    this.last = -MIN_REDRAW_INTERVAL;
    this.cost = 0;
    this.element = h("div", { class: "curves" });
    const options = { rootMargin: "120px" };
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        target.card.inView = isIntersecting;
        if (isIntersecting) this.schedule();
      }
    }, options);
    this.sized = new ResizeObserver((entries) => {
      for (const { target } of entries) this.touch(target.card);
    });
    const all = () => this.cards.forEach((card) => this.touch(card));
    window.addEventListener("quartet:theme", all, { signal });
    document.addEventListener("visibilitychange", () => this.schedule(), { signal });
    signal.addEventListener("abort", () => this.end());
  }

  /** Add a chart. See Chart for `spec`. */
  add(spec) {
    const card = new Chart(spec, this);
    this.cards.push(card);
    this.element.append(card.element);
    this.seen.observe(card.element);
    this.sized.observe(card.element);
    return card;
  }

  touch(card) {
    this.dirty.add(card);
    this.schedule();
  }

  schedule() {
    if (this.timer !== null || this.ended) return;
    if (document.hidden) return;
    const interval = Math.min(MAX_REDRAW_INTERVAL, Math.max(MIN_REDRAW_INTERVAL, INTERVAL_FACTOR * this.cost));
    const wait = Math.max(0, this.last + interval - performance.now());
    this.timer = setTimeout(() => this.redraw(), wait);
  }

  async redraw() {
    this.last = performance.now();
    this.cost = 0;
    for (const card of [...this.dirty]) {
      if (!card.inView || !card.data) continue;
      this.dirty.delete(card);
      const started = performance.now();
      await card.draw().catch((error) => card.showMessage(error.message));
      this.cost += performance.now() - started;
      // Yield after each chart, so that typing and scrolling are handled in between.
      await new Promise((resolve) => setTimeout(resolve));
      if (this.ended) return;
    }
    this.timer = null;
    if ([...this.dirty].some((card) => card.inView && card.data)) this.schedule();
  }

  /** Move the crosshair of all charts to a step; null hides it. */
  point(step) {
    this.pointed = step;
    if (this.pointing) return;
    this.pointing = requestAnimationFrame(() => {
      this.pointing = null;
      for (const card of this.cards) card.point(this.pointed);
    });
  }

  end() {
    this.ended = true;
    clearTimeout(this.timer);
    this.seen.disconnect();
    this.sized.disconnect();
    for (const card of this.cards) charts.release(card.plot);
  }
}

/**
 * One chart. `spec`: {title, unit, about, series: [{label, colour, dashed, area, always}], main, zero, ticks, format}. `main` is the index of
 * the series whose value the title shows, `ticks` the format of the axis; `always` keeps a series without data in the legend.
 * Data: {series: [{x, y, low, high}], range, marks}, with the series in the order of the spec; null for a series without points.
 */
class Chart {
  constructor(spec, group) {
    this.spec = spec;
    this.group = group;
    this.format = spec.format ?? number;
    this.plot = h("div", { class: spec.series.length > 1 ? "plot" : "plot single" });
    this.line = h("div", { class: "crosshair" });
    this.nothing = h("div", { class: "plot-empty", hidden: true });
    this.now = h("span", { class: "curve-now" });
    this.key = h("div", { class: "curve-key", "aria-hidden": "true" });
    const frame = h("div", { style: { position: "relative" } }, this.plot, this.line, this.nothing);
    this.title = h("h3", { title: spec.about ?? null }, spec.title, spec.unit ? h("small", {}, ` ${spec.unit}`) : null);
    this.element = h(
      "figure",
      { class: "curve panel", tabindex: 0, role: "group", "aria-label": spec.title, onkeydown: (event) => this.keyed(event) },
      h("div", { class: "curve-head" }, this.title, this.now),
      spec.series.length > 1 ? this.key : null,
      frame,
    );
    this.element.card = this;
    frame.addEventListener("pointermove", (event) => this.moved(event, frame));
    frame.addEventListener("pointerleave", () => group.point(null));
    this.element.addEventListener("blur", () => group.point(null));
    this.element.addEventListener("dblclick", () => group.onzoom?.(null));
  }

  /** Set the data and schedule a redraw. */
  set(data) {
    this.data = data;
    this.steps = [...new Set(data.series.flatMap((series) => series?.x ?? []))].sort((a, b) => a - b);
    this.showMessage(this.steps.length ? "" : "no data in this run");
    this.write(null);
    this.group.touch(this);
  }

  /** Show a message instead of the curves; an empty text shows the curves. */
  showMessage(text) {
    write(this.nothing, text);
    this.nothing.hidden = !text;
  }

  async draw() {
    const { series, range, marks } = this.data;
    const traces = series.flatMap((line, at) => (line?.x.length ? charts.lineTraces({ ...this.spec.series[at], ...line }) : []));
    const { zero, ticks } = this.spec;
    const zoom = Boolean(this.group.onzoom);
    await charts.draw(this.plot, traces, charts.lineLayout({ range, marks, zero, ticks, zoom }));
    if (!this.listening && this.plot.on) {
      this.listening = true;
      this.plot.on("plotly_relayout", (change) => {
        const [start, end] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
        if (start !== undefined) this.group.onzoom?.(Math.max(1, Math.ceil(start)), Math.floor(end));
      });
    }
  }

  moved(event, frame) {
    const step = charts.stepAt(this.plot, event.clientX - frame.getBoundingClientRect().left);
    this.group.point(step === null ? null : this.nearest(step));
  }

  nearest(step) {
    let best = null;
    for (const known of this.steps ?? []) if (best === null || Math.abs(known - step) < Math.abs(best - step)) best = known;
    return best;
  }

  keyed(event) {
    if (event.key === "Escape") return this.group.onzoom?.(null);
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.steps?.length || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const at = this.steps.indexOf(this.group.pointed ?? this.steps.at(-1));
    const to = Math.min(this.steps.length - 1, Math.max(0, (at < 0 ? this.steps.length - 1 : at) + move));
    this.group.point(this.steps[to]);
    announce(this.description(this.steps[to]));
  }

  point(step) {
    const pixels = step === null ? null : charts.pixelOf(this.plot, step);
    this.line.style.visibility = pixels === null ? "hidden" : "visible";
    if (pixels !== null) this.line.style.transform = `translateX(${pixels}px)`;
    this.write(pixels === null ? null : step);
  }

  /** Show the values at a step, or the last values for null. */
  write(step) {
    const values = (this.data?.series ?? []).map((line) => valueAt(line, step));
    const single = this.spec.series.length === 1 || this.spec.main !== undefined;
    const main = values[this.spec.main ?? 0];
    const at = step === null ? "" : `step ${whole(step)}`;
    if (single) {
      replace(this.now, at ? h("small", { class: "muted small" }, `${at} `) : null, main === undefined ? "" : this.format(main));
    } else replace(this.now, at ? h("small", { class: "muted small" }, at) : null);
    const entries = this.spec.series.map((series, index) => {
      if (values[index] === undefined && !series.always) return null;
      const classes = [series.dashed ? "dashed" : "", series.area ? "area" : ""].join(" ").trim() || null;
      return h(
        "span",
        { class: classes, style: { "--key": `var(--${series.colour})` } },
        series.label,
        single ? null : [" ", h("b", {}, this.format(values[index]))],
      );
    });
    replace(this.key, entries);
    this.element.setAttribute("aria-label", `${this.spec.title}: ${this.description(step)}`);
  }

  description(step) {
    const parts = (this.data?.series ?? []).map((line, index) => {
      const value = valueAt(line, step);
      return value === undefined ? null : `${this.spec.series[index].label} ${this.format(value)}`;
    });
    const text = parts.filter(Boolean).join(", ");
    return text ? `${step === null ? "now" : `step ${step}`}: ${text}` : "no data in this run";
  }
}

function valueAt(line, step) {
  if (!line?.x.length) return undefined;
  if (step === null || line.constant) return line.y.at(-1);
  let low = 0;
  let high = line.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] < step) low = middle + 1;
    else high = middle;
  }
  return line.y[low];
}
