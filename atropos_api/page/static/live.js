// One stream for all tabs: a browser opens six connections to a host, over all its tabs, and an event stream takes one
// permanently. The tabs of a broker elect a visible one; it reads the stream and passes everything on. A hidden tab
// reads no stream. Where the stream does not work, the status is asked for every two seconds with its ETag.

const BEAT_MS = 1000;
const SILENT_MS = 3500;
const ASK_MS = 250;
const POLL_MS = 2000;
const HIDDEN_POLL_MS = 30000;
const STREAM_SILENT_MS = 40000;
const RETRY_STREAM_MS = 30000;

export class Live {
  /** `take` is called with each message: {kind: "status" | "event" | "connection", ...}. */
  constructor(source, eventTypes, take) {
    this.source = source;
    this.eventTypes = eventTypes;
    this.take = take;
    this.id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
    this.leads = false;
    this.leaderSeen = 0;
    this.stream = null;
    this.heardAt = 0;
    this.streamFailedAt = 0;
    this.lastId = null;
    this.polling = false;
    this.askedAt = 0;
    this.tickedAt = Date.now();
    this.state = null;
    this.channel = "BroadcastChannel" in window ? new BroadcastChannel(`atropos:${source.base.pathname}`) : null;
  }

  start() {
    if (this.channel) this.channel.onmessage = (message) => this.hear(message.data);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.join()));
    window.addEventListener("pagehide", () => this.rest());
    this.timer = setInterval(() => this.tick(), BEAT_MS);
    if (!document.hidden) this.join();
  }

  /** Ask which tab leads; lead if none answers. */
  join() {
    this.refresh();
    if (!this.channel) {
      this.lead();
      return;
    }
    this.say({ kind: "ask" });
    setTimeout(() => {
      if (!document.hidden && Date.now() - this.leaderSeen > SILENT_MS) this.lead();
    }, ASK_MS + Math.random() * ASK_MS);
  }

  rest() {
    if (this.leads) this.say({ kind: "bye" });
    this.follow();
  }

  /** Read the stream for all tabs. Two joins in one moment lead once: a second stream would stay open for good. */
  lead() {
    if (this.leads) return;
    this.leads = true;
    this.beat();
    this.open();
  }

  follow() {
    this.leads = false;
    if (this.stream) this.stream.close();
    this.stream = null;
  }

  /** Tell the other tabs that this one leads, and the state of its connection, which is theirs. */
  beat() {
    this.say({ kind: "beat", state: this.state });
  }

  say(message) {
    if (this.channel) this.channel.postMessage({ from: this.id, ...message });
  }

  hear(message) {
    if (message.kind === "ask" && this.leads) this.beat();
    else if (message.kind === "beat") {
      this.leaderSeen = Date.now();
      // Two tabs that began at once both lead for a moment; the one that is first in order goes on leading.
      if (this.leads && message.from < this.id) this.follow();
      if (!this.leads && message.state) this.take({ kind: "connection", state: message.state });
    } else if (message.kind === "bye") {
      this.leaderSeen = 0;
      if (!document.hidden) this.join();
    } else if (message.kind === "pass" && !this.leads) {
      // A tab that leads later continues here: events that are sent again would open its view again.
      if (message.lastId) this.lastId = message.lastId;
      this.take(message.content);
    }
  }

  pass(content) {
    if (content.kind === "connection") this.state = content.state;
    this.take(content);
    this.say({ kind: "pass", content, lastId: this.lastId });
  }

  /** Hand something to this tab, and to the others if this one leads. */
  deliver(content) {
    if (this.leads) this.pass(content);
    else this.take(content);
  }

  tick() {
    const now = Date.now();
    if (now < this.tickedAt) {
      // The machine's clock was set back, perhaps by hours: nothing would be due until it is as late again.
      this.leaderSeen = this.streamFailedAt = this.askedAt = 0;
      this.heardAt = now;
    }
    this.tickedAt = now;
    if (document.hidden) {
      // The title of a hidden tab says if the run is blocked: a visible tab passes it on, or it is requested now and then.
      if (now - this.leaderSeen > SILENT_MS && now - this.askedAt > HIDDEN_POLL_MS) this.refresh();
      return;
    }
    if (!this.leads) {
      if (now - this.leaderSeen > SILENT_MS) this.join();
      return;
    }
    this.beat();
    if (this.stream && now - this.heardAt > STREAM_SILENT_MS) this.lose();
    if (!this.stream && now - this.streamFailedAt > RETRY_STREAM_MS) this.open();
    if (!this.stream || this.stream.readyState !== EventSource.OPEN) this.refresh();
  }

  open() {
    if (!("EventSource" in window)) return;
    const stream = new EventSource(this.source.url("v1/events", { after: this.lastId }));
    this.stream = stream;
    this.heardAt = Date.now();
    stream.onopen = () => {
      this.heardAt = Date.now();
      this.pass({ kind: "connection", state: "live" });
    };
    stream.onerror = () => {
      if (this.stream !== stream) return;
      this.pass({ kind: "connection", state: "lost" });
      if (stream.readyState === EventSource.CLOSED) this.lose();
    };
    const heard = (message, content) => {
      this.heardAt = Date.now();
      if (message.lastEventId) this.lastId = message.lastEventId;
      this.pass(content);
    };
    stream.addEventListener("status", (message) => heard(message, { kind: "status", status: JSON.parse(message.data) }));
    for (const type of this.eventTypes) {
      stream.addEventListener(type, (message) => heard(message, { kind: "event", event: eventOf(type, message) }));
    }
  }

  /** Close the stream for some time; the status is requested meanwhile. */
  lose() {
    if (this.stream) this.stream.close();
    this.stream = null;
    this.streamFailedAt = Date.now();
  }

  /** Ask for the status, at most once at a time. */
  async refresh() {
    if (this.polling || Date.now() - this.askedAt < POLL_MS - BEAT_MS / 2) return;
    this.polling = true;
    this.askedAt = Date.now();
    try {
      const status = await this.source.poll();
      const streams = this.stream && this.stream.readyState === EventSource.OPEN;
      if (this.leads && !streams) this.deliver({ kind: "connection", state: "polling" });
      if (status) this.deliver({ kind: "status", status });
    } catch (error) {
      this.deliver({ kind: "connection", state: "lost", detail: error.message });
    } finally {
      this.polling = false;
    }
  }
}

function eventOf(type, message) {
  const { time, ...data } = JSON.parse(message.data);
  // That events were missed has no id of its own: its place is after the last event before them.
  const id = type === "missed" ? data.after + 0.5 : Number(message.lastEventId);
  return { type, id, time, data };
}
