// The dashboard's entry point: session, sign-in, and the page that the address names.

import { current, to } from "./address.js";
import * as api from "./api.js";
import * as charts from "./charts.js";
import { failure, loading } from "./components/placeholders.js";
import { h, replace } from "./dom.js";
import { comparePage } from "./pages/compare.js";
import { RunFrame } from "./pages/run.js";
import { runsPage } from "./pages/runs.js";
import { signInPage } from "./pages/sign_in.js";
import { recording } from "./recording.js";
import { installShortcuts } from "./shortcuts.js";
import { drawToolbar } from "./toolbar.js";

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
  if (!recording && !api.token()) return signIn();
  const { parts, query } = current();
  if (!session) {
    // The response usually arrives at once; an immediate loading indicator would flicker.
    const waiting = setTimeout(() => replace(main, loading("60vh")), 400);
    try {
      session = await api.session(signal).finally(() => clearTimeout(waiting));
    } catch (problem) {
      if (problem.status > 0 || problem.status === 0) replace(main, failure(problem, show));
      return;
    }
    if (signal.aborted) return;
    drawToolbar(session, recording ? null : leave);
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
  charts.ready().catch(() => null); // Preload after the first page is drawn.
  if (moved && !signal.aborted) {
    scrollTo(0, 0);
    // Screen readers continue at the new page. The very first page keeps the initial focus.
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
  drawToolbar(null);
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
  signIn(had ? "The gateway no longer accepts this token. It may have been restarted: use its new link." : event.detail);
});
window.addEventListener("hashchange", show);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
installShortcuts(() => frame);
show();
