// The event stream of a run, read with fetch, because EventSource cannot send the Authorization header.

import { open } from "./api.js";

const FIRST_RETRY_DELAY_MS = 500;
const MAX_RETRY_DELAY_MS = 15000;
/** The gateway sends at least a comment every 15 seconds. After three times that, the connection counts as lost. */
const SILENCE_TIMEOUT_MS = 45000;

/** Parse server-sent events. Accepts text in chunks of any size; calls `onEvent({id, type, data})`. */
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

/** Keep the event stream of one run open, and resume it after the last received event. */
export class EventStream extends EventTarget {
  /** Emit `state` events with the state of the connection: `live`, `waiting` or `lost`. */
  constructor(run) {
    super();
    this.run = run;
    this.state = "waiting";
    this.last = null;
    this.stopped = false;
    this.failures = 0;
  }

  /** Call `listener(data)` for every event of a type until `signal` aborts. */
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
        if (error.status === 422) this.forgetPosition();
        this.failures += 1;
        before = before || this.state === "live";
      }
      if (this.stopped) break;
      this.setState(this.failures > 3 ? "lost" : "waiting");
      const delay = Math.min(MAX_RETRY_DELAY_MS, FIRST_RETRY_DELAY_MS * 2 ** this.failures);
      await new Promise((resolve) => {
        this.wake = resolve;
        this.timer = setTimeout(resolve, delay * (0.7 + 0.6 * Math.random()));
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
    this.setState("live");
    // Without an id, missed events are unknown: the pages must read everything again.
    if (again && !this.last) this.emit("rewind", { step: null });
    const parser = new Parser((event) => this.receive(event));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const silence = setTimeout(() => this.connection.abort(), SILENCE_TIMEOUT_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return;
      parser.feed(value);
    }
  }

  receive({ id, type, data }) {
    if (this.connection.signal.aborted) return;
    let content;
    try {
      content = JSON.parse(data);
    } catch {
      return;
    }
    if (type === "rewind" && content.step === 0) {
      // The gateway would send the whole history. Instead, resume at the present and let the pages read everything again.
      this.forgetPosition();
      this.connection.abort();
      return;
    }
    if (id !== undefined) this.last = id;
    this.emit(type, content);
  }

  /** Drop the last id, which the gateway does not accept. The next connection starts at the present. */
  forgetPosition() {
    this.last = null;
  }

  setState(state) {
    if (state === this.state) return;
    this.state = state;
    this.emit("state", state);
  }

  emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
