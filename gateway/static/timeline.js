// What a step's spans tell: how busy each service was, where it idled, and the chain of work that the step's length comes from.

const ORDER = ["orchestrator", "actor", "reward", "reference", "critic", "redis"];
/** Spans closer than this many seconds touch. */
const NEAR = 1e-4;

/** The services that have spans, in the order in which a step goes through them. */
export function servicesOf(spans) {
  const found = [...new Set(spans.map((span) => span.service))];
  const place = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  return found.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

/** Seconds of the step: to the end of its last span. */
export const lengthOf = (spans) => Math.max(0, ...spans.map((span) => span.end));

/** The times in which any of `spans` goes on, as [start, end] pairs that do not touch. */
export function union(spans) {
  const joined = [];
  for (const { start, end } of [...spans].sort((a, b) => a.start - b.start)) {
    const last = joined.at(-1);
    if (last && start <= last[1] + NEAR) last[1] = Math.max(last[1], end);
    else joined.push([start, end]);
  }
  return joined;
}

/** What `times` leave free of 0 to `length`. */
export function gaps(times, length) {
  const free = [];
  let at = 0;
  for (const [start, end] of times) {
    if (start > at + NEAR) free.push([at, start]);
    at = Math.max(at, end);
  }
  if (length > at + NEAR) free.push([at, length]);
  return free;
}

const total = (times) => times.reduce((sum, [start, end]) => sum + end - start, 0);

/** Waiting is not work. */
export const isWork = (span) => span.phase !== "wait";

/** Of each service: {service, busy, share, calls, phases: [[phase, seconds]], alone: seconds in which nobody else worked}. */
export function shares(spans) {
  const length = lengthOf(spans);
  return servicesOf(spans).map((service) => {
    const own = spans.filter((span) => span.service === service && isWork(span));
    const times = union(own);
    const others = union(spans.filter((span) => span.service !== service && isWork(span)));
    const together = total(times) + total(others) - total(union(spans.filter(isWork)));
    const phases = [...new Set(own.map((span) => span.phase))].map((phase) => [phase, total(union(own.filter((span) => span.phase === phase)))]);
    const busy = total(times);
    return {
      service,
      busy,
      share: length ? busy / length : 0,
      alone: Math.max(0, busy - together),
      calls: own.reduce((sum, span) => sum + span.count, 0),
      phases: phases.sort((a, b) => b[1] - a[1]),
    };
  });
}

/**
 * The fewest pieces of work that cover the step from its end to its start: at each moment the one that had gone on longest. Its
 * links are {service, phase, start, end, span}, earliest first; where nobody worked `span` is null and the phase "nothing".
 */
export function chain(spans) {
  const work = spans.filter((span) => isWork(span) && span.end - span.start > NEAR);
  const links = [];
  let now = lengthOf(spans);
  while (now > NEAR) {
    const under = work.filter((span) => span.start < now - NEAR && span.end >= now - NEAR);
    if (under.length) {
      const span = under.reduce((best, item) => (item.start < best.start ? item : best));
      links.push({ service: span.service, phase: span.phase, start: span.start, end: now, span });
      now = span.start;
      continue;
    }
    const before = Math.max(0, ...work.filter((span) => span.end < now).map((span) => span.end));
    links.push({ service: "", phase: "nothing", start: before, end: now, span: null });
    now = before;
  }
  return links.reverse();
}
