// The dashboard's frame: who is asking, which page the address names, and what every page shares.

import { current, to } from "./address.js";
import * as api from "./api.js";
import * as charts from "./charts.js";
import { failure, loading } from "./components/states.js";
import { h, replace } from "./dom.js";
import { comparePage } from "./pages/compare.js";
import { RunFrame } from "./pages/run.js";
import { runsPage } from "./pages/runs.js";
import { signInPage } from "./pages/signin.js";
import { installShortcuts } from "./shortcuts.js";
import { drawTools } from "./tools.js";

const main = document.getElementById("main");
const sections = document.getElementById("sections");
const where = document.getElementById("where");

let session = null;
let frame = null;
let page = new AbortController();
let shown = "";

async function show() {
  if (location.hash.includes("token=")) {
    api.takeTokenFromLink();
    session = null;
    leaveRun();
  }
  page.abort();
  page = new AbortController();
  const { signal } = page;
  if (!api.token()) return signIn();
  const { parts, query } = current();
  if (!session) {
    // Most often the answer comes at once, and a sign of waiting would only flicker.
    const waiting = setTimeout(() => replace(main, loading("60vh")), 400);
    try {
      session = await api.session(signal).finally(() => clearTimeout(waiting));
    } catch (problem) {
      if (problem.status > 0 || problem.status === 0) replace(main, failure(problem, show));
      return;
    }
    if (signal.aborted) return;
    drawTools(session, leave);
    if (!parts.length && session.run) return go(to(["runs", session.run, "overview"]));
  }
  const path = parts.join("/");
  const moved = path !== shown;
  shown = path;
  if (parts[0] === "runs" && parts.length >= 2) await showRun(parts, query, signal);
  else {
    leaveRun();
    if (parts[0] === "compare") await comparePage({ main, where, query, signal, session });
    else await runsPage({ main, where, query, signal, session });
  }
  charts.ready().catch(() => null); // Ahead of the first chart, behind the first page.
  if (moved && !signal.aborted) {
    scrollTo(0, 0);
    // A screen reader goes on at the new page; the first page of all leaves the focus at its start.
    if (show.before) main.focus({ preventScroll: true });
    show.before = true;
  }
}

async function showRun(parts, query, signal) {
  if (frame?.run !== parts[1]) {
    leaveRun();
    frame = new RunFrame(parts[1], { main, sections, where, session });
    try {
      await frame.start();
    } catch (problem) {
      if (problem.status === 401 || problem.name === "AbortError") return;
      frame.end();
      frame = null;
      replace(main, failure(problem, show), h("p", { class: "state" }, h("a", { href: "#/runs" }, "All runs")));
      return;
    }
  }
  if (!signal.aborted) await frame.show(parts.slice(2), query, signal);
}

function leaveRun() {
  frame?.end();
  frame = null;
}

function go(address) {
  history.replaceState(null, "", address);
  return show();
}

function signIn(reason) {
  leaveRun();
  shown = "";
  session = null;
  drawTools(null);
  document.title = "Sign in · Quartet";
  replace(where);
  signInPage(main, reason, show);
}

function leave() {
  api.forgetToken();
  signIn();
}

window.addEventListener("quartet:signin", (event) => {
  const had = session !== null;
  page.abort();
  api.forgetToken();
  signIn(had ? "The gateway no longer takes this token. It may have been restarted: use its new link." : event.detail);
});
window.addEventListener("hashchange", show);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
installShortcuts(() => frame);
show();
