// The live events of a run: server-sent events read with fetch, because EventSource cannot send the Authorization header.

import { open } from "./api.js";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15000;
/** The gateway sends at least a comment every 15 seconds; after three times that the connection is dead. */
const SILENCE = 45000;

/** Splits what arrives into events. Fed with text in pieces of any size; calls `onEvent({id, type, data})`. */
export class Parser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.rest = "";
    this.clear();
  }

  clear() {
    this.type = "message";
    this.data = [];
    this.id = undefined;
  }

  feed(text) {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    for (const line of lines) this.line(line);
  }

  line(line) {
    if (line === "") {
      if (this.data.length) this.onEvent({ id: this.id, type: this.type, data: this.data.join("\n") });
      this.clear();
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.data.push(value);
    else if (field === "event") this.type = value;
    else if (field === "id") this.id = value;
  }
}

/** Keeps a stream of one run open and takes it up again after the last event that arrived. */
export class Events extends EventTarget {
  /** `state` events say how the connection is: `live`, `waiting`, `gone`. */
  constructor(run) {
    super();
    this.run = run;
    this.state = "waiting";
    this.last = null;
    this.stopped = false;
    this.failures = 0;
  }

  /** Calls `listener(data)` for every event of a type until `signal` ends it. */
  on(type, listener, signal) {
    this.addEventListener(type, (event) => listener(event.detail), { signal });
  }

  start() {
    this.keepOpen();
    return this;
  }

  stop() {
    this.stopped = true;
    this.connection?.abort();
    clearTimeout(this.timer);
    this.wake?.();
  }

  async keepOpen() {
    let before = false;
    while (!this.stopped) {
      try {
        await this.read(before);
        before = true;
      } catch (error) {
        if (this.stopped || error.status === 401) break;
        if (error.status === 422) this.forget();
        this.failures += 1;
        before = before || this.state === "live";
      }
      if (this.stopped) break;
      this.tell(this.failures > 3 ? "gone" : "waiting");
      const pause = Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** this.failures);
      await new Promise((resolve) => {
        this.wake = resolve;
        this.timer = setTimeout(resolve, pause * (0.7 + 0.6 * Math.random()));
      });
    }
  }

  async read(again) {
    this.connection = new AbortController();
    const headers = { Accept: "text/event-stream", ...(this.last ? { "Last-Event-ID": this.last } : {}) };
    const response = await open(`/runs/${encodeURIComponent(this.run)}/events`, {
      signal: this.connection.signal,
      headers,
    });
    this.failures = 0;
    this.tell("live");
    // Without an id nothing tells what was missed meanwhile, so everything is read anew.
    if (again && !this.last) this.emit("rewind", { step: null });
    const parser = new Parser((event) => this.take(event));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const silence = setTimeout(() => this.connection.abort(), SILENCE);
      const { value, done } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return;
      parser.feed(value);
    }
  }

  take({ id, type, data }) {
    if (this.connection.signal.aborted) return;
    let content;
    try {
      content = JSON.parse(data);
    } catch {
      return;
    }
    if (type === "rewind" && content.step === 0) {
      // Everything would be told anew: the pages read it instead, once the stream is taken up at the present.
      this.forget();
      this.connection.abort();
      return;
    }
    if (id !== undefined) this.last = id;
    this.emit(type, content);
  }

  /** The gateway does not know the id: it is not of this run, or not whole. What is on show is read anew. */
  forget() {
    this.last = null;
  }

  tell(state) {
    if (state === this.state) return;
    this.state = state;
    this.emit("state", state);
  }

  emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
