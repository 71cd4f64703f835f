// Analysis of a step's spans: busy and idle time of each service, and the critical path.

const ORDER = ["orchestrator", "actor", "generator", "reward", "reference", "critic", "redis"];
/** Spans closer than this many seconds count as adjacent. */
const TOLERANCE = 1e-4;

/** Return the services that have spans, in the order in which a step uses them. */
export function servicesOf(spans) {
  const services = [...new Set(spans.map((span) => span.service))];
  // A generator is the service "generator HOST:PORT".
  const rank = (name) => (ORDER.includes(name.split(" ")[0]) ? ORDER.indexOf(name.split(" ")[0]) : ORDER.length);
  return services.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

/** Return the duration of the step in seconds: the end of its last span. */
export const lengthOf = (spans) => Math.max(0, ...spans.map((span) => span.end));

/** Return the union of spans as disjoint [start, end] pairs. */
export function union(spans) {
  const joined = [];
  for (const { start, end } of [...spans].sort((a, b) => a.start - b.start)) {
    const last = joined.at(-1);
    if (last && start <= last[1] + TOLERANCE) last[1] = Math.max(last[1], end);
    else joined.push([start, end]);
  }
  return joined;
}

/** Return the parts of 0 to `length` that `times` do not cover. */
export function gaps(times, length) {
  const free = [];
  let at = 0;
  for (const [start, end] of times) {
    if (start > at + TOLERANCE) free.push([at, start]);
    at = Math.max(at, end);
  }
  if (length > at + TOLERANCE) free.push([at, length]);
  return free;
}

const total = (times) => times.reduce((sum, [start, end]) => sum + end - start, 0);

/** Return whether a span is work rather than waiting. */
export const isWork = (span) => span.phase !== "wait";

/** Return {service, busy, share, calls, phases: [[phase, seconds]], exclusive} per service; `exclusive` is busy time while no other service works. */
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
      exclusive: Math.max(0, busy - together),
      calls: own.reduce((sum, span) => sum + span.count, 0),
      phases: phases.sort((a, b) => b[1] - a[1]),
    };
  });
}

/**
 * Return the critical path of the step. It is followed from the end of the step to its start, at each moment along the span that
 * started earliest. Its links are {service, phase, start, end, span}, earliest first; `span` is null in times without work.
 */
export function criticalPath(spans) {
  const work = spans.filter((span) => isWork(span) && span.end - span.start > TOLERANCE);
  const links = [];
  let now = lengthOf(spans);
  while (now > TOLERANCE) {
    const active = work.filter((span) => span.start < now - TOLERANCE && span.end >= now - TOLERANCE);
    if (active.length) {
      const span = active.reduce((best, item) => (item.start < best.start ? item : best));
      links.push({ service: span.service, phase: span.phase, start: span.start, end: now, span });
      now = span.start;
      continue;
    }
    const before = Math.max(0, ...work.filter((span) => span.end < now).map((span) => span.end));
    links.push({ service: "", phase: "idle", start: before, end: now, span: null });
    now = before;
  }
  return links.reverse();
}
