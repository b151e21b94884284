// The page: it reads the status once, shows the first screen, then listens; the address says which view is open.

import { showCurves, Panels } from "./curves.js";
import { announce, fill, h, setText, visible } from "./dom.js";
import { EVENT_TYPES, merged, showEvents, signList, signsOf } from "./events.js";
import { makeFlow } from "./flow.js";
import { showGroup } from "./group.js";
import { Live } from "./live.js";
import { showParts } from "./parts.js";
import { showRollouts } from "./rollouts.js";
import { SeriesCache } from "./series.js";
import { NotAvailable, Source } from "./source.js";
import { hashOf, parseHash, runOf, Store } from "./store.js";

const VIEWS = { overview: "Overview", curves: "Curves", rollouts: "Rollouts", parts: "Parts", events: "Events" };
const CONNECTIONS = { live: "live", polling: "asking every 2 s", lost: "connection lost", ended: "ended" };
const ENDED = ["finished", "ended"];
const REFRESH_MS = 2000;

const source = new Source();
const store = new Store();
const cache = new SeriesCache(source);
const main = document.getElementById("main");
let shown = { close() {} };
let openView = 0;

function environments() {
  const status = store.get("status");
  return status ? status.environments.map((one) => ({ id: one.environment_id, name: one.name })) : [];
}

function signs(runId) {
  return signsOf(store.get("events") || [], runId);
}

/** Open the view that the address names; an answer is dropped if another view was opened before it came. */
async function open() {
  const route = parseHash(location.hash);
  const number = (openView += 1);
  if (shown.close) shown.close();
  shown = {};
  markView(route.view);
  const container = h("div", { class: `view view-${route.view}` });
  fill(main, container);
  const run = runOf(store, route);
  markRun(run);
  const shared = { container, store, source, cache, run, route, environments, signs, panels: store.get("panels") || [], onProblem: problem };
  try {
    const opened = await viewOf(route.view, shared);
    if (number === openView) shown = opened || {};
    else if (opened && opened.close) opened.close();
  } catch (error) {
    if (number === openView) fill(container, h("p", { class: "problem", role: "alert" }, visible(error.message)));
  }
}

function viewOf(view, shared) {
  if (view === "parts") return showParts(shared);
  if (shared.route.run && !shared.run) return fill(shared.container, unknownRun(shared.route)) && {};
  if (view === "events") return showEvents(shared);
  if (view === "overview" || !(view in VIEWS || view === "group")) return showOverview(shared);
  if (!shared.run) return fill(shared.container, h("p", { class: "note" }, "No run has begun yet.")) && {};
  return { curves: showCurves, rollouts: showRollouts, group: showGroup }[view](shared);
}

/** A link may name a run of another broker, or of this one before its store was emptied: no other run is shown for it. */
function unknownRun(route) {
  return h("p", { class: "problem", role: "alert" }, "The broker knows no run ", visible(route.run), ". ", h("a", { href: hashOf({ ...route, run: null }) }, "Show the newest run"));
}

function showOverview({ container, run, panels, onProblem }) {
  const flow = h("div", { class: "flow" });
  const charts = h("div", { class: "charts small" });
  const trouble = h("div", {});
  const whose = h("p", { class: "note" });
  fill(container, flow, whose, charts, h("section", { class: "card" }, h("h2", {}, "Signs of trouble"), trouble));
  const runId = run && run.run_id;
  const showFlow = makeFlow(flow);
  const onStatus = (status) => {
    showFlow(status);
    const other = run && status.run && status.run.run_id !== runId;
    setText(whose, other ? `The flow above is that of ${visible(status.run.name)}; below are curves and signs of ${visible(run.name)} (${runId}).` : "");
  };
  const onEvents = () => fill(trouble, signList(signs(runId), runId));
  if (store.get("status")) onStatus(store.get("status"));
  onEvents();
  const curves = run ? new Panels({ container: charts, panels: panels.filter((panel) => panel.key), cache, runs: [run], environments, signs, onProblem, small: true }) : null;
  return { onStatus, onEvents, update: () => curves && curves.update(), redraw: () => curves && curves.redraw(), close: () => curves && curves.close() };
}

function problem(error) {
  if (!(error instanceof NotAvailable || error instanceof TypeError)) console.error(error);
  announce(error.message);
}

function markView(view) {
  const current = view === "group" ? "rollouts" : view;
  const { run } = parseHash(location.hash);
  fill(document.getElementById("views"), Object.entries(VIEWS).map(([name, title]) => h("a", { href: hashOf({ view: name, run }), "aria-current": name === current ? "page" : null }, title)));
}

/** Choose a run among those on offer, or none: the address may name one that is not known. */
function markRun(run) {
  document.getElementById("runs").value = run ? run.run_id : "";
}

function showHead(status) {
  const run = status.run;
  setText(document.getElementById("run-name"), run ? visible(run.name) : "Atropos");
  setText(document.getElementById("run-state"), run ? run.state : "no run");
  document.title = titleOf(status);
}

/** The title of the tab: it begins with the word that a run is blocked, for a user of another tab. */
function titleOf({ run, flow }) {
  if (!run) return "Atropos";
  const { severity, headline } = flow.diagnosis.finding;
  return visible(severity === "blocked" ? `blocked: ${headline} · ${run.name}` : `${run.current_step} · ${run.name}`);
}

/** Show the state of the connection, unless the run has ended: then nothing more comes over it. */
function showConnection() {
  const [status, connection] = [store.get("status"), store.get("connection")];
  const state = status && ENDED.includes(status.flow.diagnosis.finding.rule) ? "ended" : connection;
  if (!state) return;
  const chip = document.getElementById("connection");
  chip.dataset.state = state;
  setText(chip, CONNECTIONS[state]);
}

/** Take a message of the stream, from this tab or another. */
async function take(message) {
  if (message.kind === "connection") {
    const back = store.get("connection") === "lost" && message.state !== "lost";
    store.set("connection", message.state);
    showConnection();
    if (back) await readRuns();
  } else if (message.kind === "event") {
    store.set("events", merged(store.get("events") || [], [message.event]));
    if (shown.onEvents) shown.onEvents(store.get("events"));
    if (["run-began", "run-finished", "missed"].includes(message.event.type)) await runsChanged(message.event);
  } else if (message.kind === "status") takeStatus(message.status);
}

function takeStatus(status) {
  const before = store.get("status");
  store.set("status", status);
  showHead(status);
  showConnection();
  if (shown.onStatus) shown.onStatus(status);
  const rule = status.flow.diagnosis.finding.rule;
  if (!before || before.flow.diagnosis.finding.rule !== rule) announce(status.flow.diagnosis.finding.headline);
  if (before && stepOf(before) !== stepOf(status)) refreshSoon();
}

function stepOf(status) {
  return status.run ? `${status.run.run_id} ${status.run.metrics_step} ${status.run.current_step}` : "";
}

/** Read the runs again. One that began may be a run resumed; where events were missed, any may be. */
async function runsChanged({ type, data }) {
  if (type !== "run-finished") cache.forget(data.run_id);
  await readRuns();
  if (type === "run-began" && !parseHash(location.hash).run) await open();
}

/** Read the runs again; a view whose run was not known until now is opened. */
async function readRuns() {
  try {
    const { runs } = await source.get("v1/runs");
    const route = parseHash(location.hash);
    const wasUnknown = route.run && !runOf(store, route);
    takeRuns(runs);
    if (wasUnknown && runOf(store, route)) await open();
  } catch (error) {
    problem(error);
  }
}

/** Offer the other runs, where there are any. */
function takeRuns(runs) {
  store.set("runs", runs);
  const picker = document.getElementById("runs");
  picker.hidden = runs.length < 2;
  fill(picker, runs.slice(0, 50).map((run) => h("option", { value: run.run_id }, `${visible(run.name)} (${run.state}, ${run.run_id.slice(-6)})`)));
  markRun(runOf(store, parseHash(location.hash)));
}

let refreshing = null;

/** Bring curves and lists up to date, at most once in two seconds. */
function refreshSoon() {
  if (refreshing || document.hidden) return;
  refreshing = setTimeout(async () => {
    refreshing = null;
    try {
      if (shown.update) await shown.update();
    } catch (error) {
      problem(error);
    }
  }, REFRESH_MS);
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  setText(document.getElementById("theme"), `Theme: ${name || "auto"}`);
}

function startTheme() {
  let theme = "";
  try {
    theme = localStorage.getItem("atropos-theme") || "";
  } catch {
    // A browser may forbid storage; the choice then lasts as long as the page.
  }
  setTheme(theme);
  document.getElementById("theme").addEventListener("click", () => {
    theme = { "": "light", light: "dark", dark: "" }[theme];
    try {
      localStorage.setItem("atropos-theme", theme);
    } catch {
      // As above.
    }
    setTheme(theme);
    if (shown.redraw) shown.redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown.redraw && shown.redraw());
}

async function start() {
  startTheme();
  markView(parseHash(location.hash).view);
  try {
    const [status, runs, panels, events] = await Promise.all([source.poll(), source.get("v1/runs"), source.get("page/panels.json"), source.get("v1/events/recent", { limit: 2000 })]);
    takeRuns(runs.runs);
    store.set("panels", panels);
    store.set("events", merged([], events.events));
    takeStatus(status);
    await open();
  } catch (error) {
    fill(main, h("p", { class: "problem", role: "alert" }, visible(error.message), " ", h("button", { type: "button", onclick: () => location.reload() }, "Try again")));
    return;
  }
  window.addEventListener("hashchange", open);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  document.getElementById("runs").addEventListener("change", (event) => (location.hash = hashOf({ view: parseHash(location.hash).view.replace("group", "rollouts"), run: event.target.value })));
  document.addEventListener("visibilitychange", () => !document.hidden && refreshSoon());
  document.documentElement.dataset.ready = "yes";
  const live = new Live(source, EVENT_TYPES, take);
  live.lastId = (store.get("events")[0] || { id: null }).id;
  live.start();
}

start();
