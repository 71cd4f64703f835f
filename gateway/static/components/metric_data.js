// Metrics over steps in the browser: the response of the gateway, with new steps appended as they are committed.

/** The curves of one run by metric name. */
export class MetricData {
  constructor() {
    this.curves = {};
    this.bucket = 1;
    this.appended = 0;
    this.first = 0;
    this.last = 0;
  }

  /** Replace the curves by a response of `/metrics`. Steps that were appended meanwhile are kept. */
  load(answer) {
    const newer = this.newer?.filter(({ step }) => step > answer.last) ?? [];
    this.curves = answer.curves;
    this.bucket = answer.bucket;
    this.first = answer.first;
    this.last = answer.last;
    this.appended = 0;
    this.newer = [];
    for (const { step, metrics } of newer) this.append(step, metrics);
  }

  /** Append a step unless it is known. Return whether it was new. */
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

  /** Drop the steps before `first`, for a sliding window. */
  dropBefore(first) {
    for (const curve of Object.values(this.curves)) {
      const at = curve.steps.findIndex((step) => step >= first);
      if (at > 0) for (const column of ["steps", "mean", "low", "high"]) curve[column].splice(0, at);
    }
    this.first = Math.max(this.first, first);
  }

  /** Return a metric as {x, y, low, high}; low and high are null unless points cover several steps. */
  line(name) {
    const curve = this.curves[name];
    if (!curve || !curve.mean.some((value) => value !== null)) return null;
    const wide = this.bucket > 1;
    // Copies: plotly does not redraw an array that it has drawn before, even if elements were appended.
    const copy = (column) => (wide ? [...column] : null);
    return { x: [...curve.steps], y: [...curve.mean], low: copy(curve.low), high: copy(curve.high) };
  }

  /** Return the steps that have a metric, as {x, y, low, high}, or null if none has. */
  points(name) {
    const curve = this.curves[name];
    const at = curve?.steps.map((_, index) => index).filter((index) => curve.mean[index] !== null);
    return at?.length ? { x: at.map((index) => curve.steps[index]), y: at.map((index) => curve.mean[index]), low: null, high: null } : null;
  }

  /** Combine two metrics step by step with `join`. Return null if the run lacks either. */
  combined(first, second, join) {
    const [left, right] = [this.curves[first], this.curves[second]];
    if (!left || !right) return null;
    const indexOfStep = new Map(right.steps.map((step, at) => [step, at]));
    const x = [];
    const y = [];
    left.steps.forEach((step, at) => {
      const other = indexOfStep.get(step);
      if (other === undefined) return;
      const [a, b] = [left.mean[at], right.mean[other]];
      x.push(step);
      y.push(a === null || b === null ? null : join(a, b));
    });
    return { x, y, low: null, high: null };
  }
}
