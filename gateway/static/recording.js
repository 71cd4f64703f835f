// The responses that `quartet report` stored in its file: the dashboard's page without a gateway.

const element = document.getElementById("recording");

/** {about, responses: {path: response}}; null with a gateway. */
export const recording = element && JSON.parse(element.textContent);

/** Return the recorded response to a request, or undefined. */
export function recorded(path, query) {
  const response = recording.responses[path];
  if (response && path.endsWith("/metrics")) return between(response, query);
  if (response && path.endsWith("/trajectories")) return matching(response, query);
  return response;
}

/** Return the curves from step `first` to step `last`. */
function between(response, { first = 1, last = Infinity }) {
  const cut = (curve) => {
    const kept = [...curve.steps.keys()].filter((at) => curve.steps[at] >= first && curve.steps[at] <= last);
    return Object.fromEntries(Object.entries(curve).map(([name, column]) => [name, kept.map((at) => column[at])]));
  };
  const curves = Object.fromEntries(Object.entries(response.curves).map(([name, curve]) => [name, cut(curve)]));
  return { ...response, curves, first: Math.max(first, response.first), last: Math.min(last, response.last) };
}

/** Return the trajectories that match all filters, in the order of `sort`. */
function matching(response, { sort, ...filters }) {
  const tests = Object.entries(filters).map(([name, value]) => {
    const [, bound, key] = /^(min|max|first|last)_(.*)/.exec(name) ?? [];
    if (value === null || value === undefined || value === "") return () => true;
    if (bound) return (row) => (bound === "min" || bound === "first" ? row[key] >= Number(value) : row[key] <= Number(value));
    if (name === "text") return (row) => `${row.prompt}\n${row.response}`.toLowerCase().includes(String(value).toLowerCase());
    return (row) => !(name in row) || String(row[name]) === String(value);
  });
  const items = response.items.filter((row) => tests.every((test) => test(row)));
  const key = sort?.replace("-", "");
  if (key && key !== "id") items.sort((left, right) => (sort === key ? 1 : -1) * (left[key] - right[key]));
  return { items, total: items.length, next: null };
}
