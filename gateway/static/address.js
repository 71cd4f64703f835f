// Addresses within the dashboard: `#/runs/NAME/steps?step=12`.

/** Return the current address: {parts: ["runs", NAME, "steps"], query: URLSearchParams}. */
export function current() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

/** Return an address without empty query values. */
export function to(parts, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Change query values in the address without leaving the page. */
export function updateQuery(query) {
  const { parts, query: before } = current();
  const merged = { ...Object.fromEntries(before), ...query };
  history.replaceState(null, "", to(parts, merged));
}
