// Client of the REST API, with one function per request. No other file of the dashboard contains its paths.

import { recorded, recording } from "./recording.js";

const BASE = "/api/v1";
const KEY = "quartet.token";

/** An error response of the API (problem+json). `status` is 0 if there was no response. */
export class Problem extends Error {
  constructor(status, detail, fields = []) {
    super(detail);
    this.status = status;
    this.fields = fields;
  }
}

/** Move the token from the link to the session storage, so that it does not stay in the address bar or the history. */
export function takeTokenFromLink() {
  const match = /[#&]token=([^&]*)/.exec(location.hash);
  if (!match) return;
  sessionStorage.setItem(KEY, decodeURIComponent(match[1]));
  const rest = location.hash.replace(match[0], "");
  history.replaceState(null, "", location.pathname + location.search + (rest.startsWith("#/") ? rest : ""));
}

export const token = () => sessionStorage.getItem(KEY);
export const setToken = (value) => sessionStorage.setItem(KEY, value);
export const forgetToken = () => sessionStorage.removeItem(KEY);

/** Send a request and return the response. Raises Problem. A refused token also triggers the sign-in page. */
export async function open(path, { method = "GET", query = {}, body, signal, headers = {} } = {}) {
  if (recording) {
    const response = recorded(path, query);
    if (response === undefined) throw new Problem(404, "This is not in the report. The dashboard shows it: quartet view.");
    return new Response(JSON.stringify(response));
  }
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  let response;
  try {
    response = await fetch(BASE + path + (text ? `?${text}` : ""), {
      method,
      signal,
      cache: "no-store",
      headers: {
        Authorization: `Bearer ${token() ?? ""}`,
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The gateway does not respond. Check that it is running and reachable from this machine.");
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (problem.status === 401) window.dispatchEvent(new CustomEvent("quartet:signin", { detail: problem.message }));
  throw problem;
}

async function problemOf(response) {
  try {
    const problem = await response.json();
    return new Problem(response.status, problem.detail || problem.title || `status ${response.status}`, problem.fields || []);
  } catch {
    return new Problem(response.status, `The gateway responded with status ${response.status}.`);
  }
}

async function request(path, options) {
  return (await open(path, options)).json();
}

const enc = encodeURIComponent;
const of = (run) => `/runs/${enc(run)}`;
const get = (path, query, signal) => request(path, { query, signal });
const post = (path, body) => request(path, { method: "POST", body });

export const session = (signal) => get("/session", {}, signal);
export const runs = (query, signal) => get("/runs", query, signal);
export const run = (name, signal) => get(of(name), {}, signal);
export const startRun = (config, resume) => post("/runs", { config, resume });
export const config = (name, signal) => get(`${of(name)}/config`, {}, signal);
export const steps = (name, query, signal) => get(`${of(name)}/steps`, query, signal);
export const step = (name, number, signal) => get(`${of(name)}/steps/${number}`, {}, signal);
export const trajectories = (name, query, signal) => get(`${of(name)}/trajectories`, query, signal);
export const evaluations = (name, signal) => allItems(`${of(name)}/evaluations`, signal);
export const evaluationRows = (name, number, signal) => allItems(`${of(name)}/evaluations/${number}`, signal);
export const evaluationSetRows = (name, number, set, signal) => allItems(`${of(name)}/evaluations/${number}/sets/${enc(set)}`, signal);
export const checkpoints = (name, signal) => allItems(`${of(name)}/checkpoints`, signal);
export const services = (name, signal) => get(`${of(name)}/services`, {}, signal);
export const profiles = (name, signal) => get(`${of(name)}/profiles`, {}, signal);
/** Return the trace of one process in a profile as a Blob. */
export const trace = async (name, number, file) => (await open(`${of(name)}/profiles/${number}/${enc(file)}`)).blob();
export const buffer = (name, signal) => get(`${of(name)}/buffer`, {}, signal);
export const guards = (name, signal) => get(`${of(name)}/guards`, {}, signal);
export const failedTrajectories = (name, query, signal) => get(`${of(name)}/failed-trajectories`, query, signal);
export const logs = (name, signal) => get(`${of(name)}/logs`, {}, signal);
export const logTail = (name, log, lines, signal) => get(`${of(name)}/logs/${enc(log)}`, { lines }, signal);
export const audit = (name, query, signal) => get(`${of(name)}/audit`, query, signal);
export const settings = (name, signal) => get(`${of(name)}/settings`, {}, signal);
export const changeSettings = (name, values) => request(`${of(name)}/settings`, { method: "PATCH", body: values });
/** `pause`, `resume`, `stop` or `checkpoint`. */
export const command = (name, verb) => post(`${of(name)}/${verb}`);
export const rollBack = (name, number) => post(`${of(name)}/rollback`, { step: number });

/** Return one trajectory by its id RUN/STEP/PROMPT/SAMPLE, or by the last three parts of it. */
export function trajectory(name, id, signal) {
  return get(`${of(name)}/trajectories/${id.split("/").slice(-3).map(enc).join("/")}`, {}, signal);
}

/** Return the curves of one run with at most `points` points; `range` is {first, last}, both optional. */
export function metrics(name, names, range, points, signal) {
  return get(`${of(name)}/metrics`, { names: names.join(","), ...range, points }, signal);
}

/** Return the curves of several runs. */
export function metricsOfRuns(runNames, names, range, points, signal) {
  return get("/metrics", { runs: runNames.join(","), names: names.join(","), ...range, points }, signal);
}

let definitions = null;

/** Return the definitions of all metrics. They are requested once. */
export async function metricDefinitions(signal) {
  definitions ??= await get("/metric-definitions", {}, signal);
  return definitions;
}

/** Return the items of all pages of a list, up to 5,000 items. */
async function allItems(path, signal) {
  const items = [];
  let cursor = null;
  do {
    const answer = await get(path, { limit: 500, cursor }, signal);
    if (Array.isArray(answer)) return answer;
    items.push(...answer.items);
    cursor = answer.next;
  } while (cursor && items.length < 5000);
  return items;
}

/** Return the items of a page or a plain list. */
export const itemsOf = (answer) => (Array.isArray(answer) ? answer : answer.items);
