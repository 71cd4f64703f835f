// How numbers, times and sizes are written: one way each, everywhere.

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A measured value with about four figures; a dash for one that is missing. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return minus(value.toExponential(2).replace("e+", "e"));
  if (size >= 1000) return minus(GROUPED.format(value));
  const digits = size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 ? 3 : 4;
  return minus(value.toFixed(digits));
}

/** A count, in groups of three digits. */
export function whole(value) {
  return value === null || value === undefined ? "–" : minus(GROUPED.format(value));
}

/** A number as one would type it, a setting's value, to six figures; anything else as it is. */
export function exact(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
}

/** With its sign, for a difference. */
export function signed(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value > 0 ? `+${number(value)}` : number(value);
}

/** A share of one as a percentage. */
export function percent(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const shown = value * 100;
  return `${shown >= 10 || shown === 0 ? shown.toFixed(0) : shown.toFixed(1)} %`;
}

/** Seconds of work. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return duration(value);
}

/** A longer time, in its two largest units. */
export function duration(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const all = Math.max(0, Math.round(value));
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86400)} d ${Math.floor((all % 86400) / 3600)} h`;
}

/** How long ago a moment was, in its largest unit. */
export function ago(moment, now = Date.now() / 1000) {
  const passed = now - moment;
  if (!moment || !Number.isFinite(passed)) return "–";
  if (passed < 5) return "now";
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} d ago`;
}

/** A moment as date and time of the reader's own clock. */
export function moment(value) {
  if (!value) return "–";
  const at = new Date(value * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** A size in bytes. */
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

/** A metric's or setting's name in words: `reward_mean` is "reward mean". */
export function words(name) {
  return name.replaceAll("_", " ");
}

/** One or several: `plural(2, "alert")` is "2 alerts". */
export function plural(count, word, many = `${word}s`) {
  return `${whole(count)} ${count === 1 ? word : many}`;
}

function minus(text) {
  return text.replaceAll("-", "−");
}
