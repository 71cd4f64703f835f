// Formatting of numbers, times and sizes.

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Format a measured value with about four significant digits; a dash if it is missing. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return minus(value.toExponential(2).replace("e+", "e"));
  if (size >= 1000) return minus(GROUPED.format(value));
  const digits = size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 ? 3 : 4;
  return minus(value.toFixed(digits));
}

/** Format a count with digit grouping. */
export function whole(value) {
  return value === null || value === undefined ? "–" : minus(GROUPED.format(value));
}

/** Number of steps of a run without an end, such as one that serves users. */
export const ENDLESS_STEPS = 1_000_000_000;

/** Format a step and the number of all steps, without the latter for a run without an end. */
export function steps(step, total) {
  return total >= ENDLESS_STEPS ? whole(step) : `${whole(step)} of ${whole(total)}`;
}

/** Format a setting as a user types it, with up to six significant digits. */
export function exact(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
}

/** Format a difference with its sign. */
export function signed(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value > 0 ? `+${number(value)}` : number(value);
}

/** Format a fraction as a percentage. */
export function percent(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const shown = value * 100;
  return `${shown >= 10 || shown === 0 ? shown.toFixed(0) : shown.toFixed(1)} %`;
}

/** Format a duration of work, given in seconds. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return duration(value);
}

/** Format a longer duration in its two largest units, given in seconds. */
export function duration(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const all = Math.max(0, Math.round(value));
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86400)} d ${Math.floor((all % 86400) / 3600)} h`;
}

/** Format the time since a moment in its largest unit. */
export function ago(moment, now = Date.now() / 1000) {
  const elapsed = now - moment;
  if (!moment || !Number.isFinite(elapsed)) return "–";
  if (elapsed < 5) return "now";
  if (elapsed < 60) return `${Math.round(elapsed)} s ago`;
  if (elapsed < 3600) return `${Math.round(elapsed / 60)} min ago`;
  if (elapsed < 86400) return `${Math.round(elapsed / 3600)} h ago`;
  return `${Math.round(elapsed / 86400)} d ago`;
}

/** Format a moment as local date and time. */
export function moment(value) {
  if (!value) return "–";
  const at = new Date(value * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** Format a size in bytes. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(size < 10 ? 1 : 0)} ${units[unit]}`;
}

/** Return the name of a metric or setting in words: `reward_mean` is "reward mean". */
export function words(name) {
  return name.replaceAll("_", " ");
}

/** Format a count with its noun: `plural(2, "alert")` is "2 alerts". */
export function plural(count, word, many = `${word}s`) {
  return `${whole(count)} ${count === 1 ? word : many}`;
}

function minus(text) {
  return text.replaceAll("-", "−");
}
