// Metrics over steps as they are kept in the browser: what the gateway sent, with the newest steps appended as they come.

/** Columns of one run by metric name. */
export class CurveData {
  constructor() {
    this.curves = {};
    this.bucket = 1;
    this.appended = 0;
    this.first = 0;
    this.last = 0;
  }

  /** Takes what `/metrics` answered in the place of what was there. Steps that came meanwhile are kept. */
  take(answer) {
    const newer = this.newer?.filter(({ step }) => step > answer.last) ?? [];
    this.curves = answer.curves;
    this.bucket = answer.bucket;
    this.first = answer.first;
    this.last = answer.last;
    this.appended = 0;
    this.newer = [];
    for (const { step, metrics } of newer) this.append(step, metrics);
  }

  /** Appends a step. One that is known already is left out; gives whether it was new. */
  append(step, metrics) {
    this.newer = [...(this.newer ?? []), { step, metrics }].slice(-500);
    if (step <= this.last) return false;
    this.last = step;
    this.first ||= step;
    this.appended += 1;
    for (const [name, value] of Object.entries(metrics)) {
      const curve = (this.curves[name] ??= { steps: [], mean: [], low: [], high: [] });
      curve.steps.push(step);
      curve.mean.push(value);
      curve.low.push(value);
      curve.high.push(value);
    }
    return true;
  }

  /** Forgets steps before `first`, for a window that moves on. */
  dropBefore(first) {
    for (const curve of Object.values(this.curves)) {
      const at = curve.steps.findIndex((step) => step >= first);
      if (at > 0) for (const column of ["steps", "mean", "low", "high"]) curve[column].splice(0, at);
    }
    this.first = Math.max(this.first, first);
  }

  /** A metric as {x, y, low, high}; the range within each point only where points stand for several steps. */
  line(name) {
    const curve = this.curves[name];
    if (!curve || !curve.mean.some((value) => value !== null)) return null;
    const wide = this.bucket > 1;
    // Copies: plotly takes an array that it has drawn for unchanged, whatever was appended to it.
    const copy = (column) => (wide ? [...column] : null);
    return { x: [...curve.steps], y: [...curve.mean], low: copy(curve.low), high: copy(curve.high) };
  }

  /** Two metrics put together step by step by `join`; null where either is missing. */
  joined(one, other, join) {
    const [left, right] = [this.curves[one], this.curves[other]];
    if (!left || !right) return null;
    const places = new Map(right.steps.map((step, at) => [step, at]));
    const x = [];
    const y = [];
    left.steps.forEach((step, at) => {
      const found = places.get(step);
      if (found === undefined) return;
      const [a, b] = [left.mean[at], right.mean[found]];
      x.push(step);
      y.push(a === null || b === null ? null : join(a, b));
    });
    return { x, y, low: null, high: null };
  }
}
