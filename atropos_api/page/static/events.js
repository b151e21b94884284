// Events, newest first, and signs of trouble with their advice.

import { fill, h, visible } from "./dom.js";
import { clock, number } from "./format.js";
import { hashOf } from "./store.js";

/** Every kind of event that a broker sends: an event stream needs the names of those to listen for. */
export const EVENT_TYPES = [
  "run-began", "run-finished", "trainer-returned", "policy", "policy-held", "policy-released", "batch-formed", "batch-committed",
  "environment-registered", "environment-left", "server-changed", "fleet-changed", "group-size-waits", "groups-dropped", "groups-expired", "groups-lost", "minimum-waived",
  "unpackable-dropped", "health", "reset", "missed",
];

const KEPT = 500;
const TROUBLE = new Set(["health", "groups-lost", "groups-expired", "minimum-waived", "group-size-waits", "unpackable-dropped", "missed"]);
const FREQUENT = new Set(["batch-formed", "batch-committed", "policy"]);

/** Add events to the known ones; each id once, newest first. Signs of trouble are kept for longer than the others. */
export function merged(known, events) {
  const ids = new Set(known.map((event) => event.id));
  const fresh = events.filter((event) => !ids.has(event.id));
  const all = [...fresh, ...known].sort((a, b) => b.id - a.id);
  return all.filter((event, at) => at < KEPT || event.type === "health").slice(0, 2 * KEPT);
}

/** Signs of trouble of a run, the newest of each kind. */
export function signsOf(events, runId) {
  const signs = new Map();
  for (const event of events) {
    if (event.type !== "health" || (runId && event.data.run_id !== runId)) continue;
    if (!signs.has(event.data.sign)) signs.set(event.data.sign, event);
  }
  return [...signs.values()];
}

/** A list of signs of trouble with advice. */
export function signList(signs, runId) {
  if (!signs.length) return h("p", { class: "note" }, "None among the events that are kept.");
  return h("ul", { class: "signs" }, signs.map(({ data, time }) => h("li", {},
    h("span", { class: "badge blocked" }, visible(data.sign)), ` step `, h("a", { href: hashOf({ view: "rollouts", run: runId, batch: data.step }) }, String(data.step)), h("span", { class: "note" }, ` ${clock(time)}`),
    h("p", {}, visible(data.message)), data.advice ? h("p", { class: "note" }, `What may help: ${visible(data.advice)}`) : null)));
}

/** The view of events. */
export function showEvents({ container, store, run }) {
  const all = h("input", { type: "checkbox", onchange: () => show(store.get("events") || []) });
  const signs = h("div", {});
  const list = h("ol", { class: "events", reversed: true });
  fill(container,
    h("section", { class: "card" }, h("h2", {}, "Signs of trouble"), signs),
    h("section", { class: "card" }, h("h2", {}, "Events"), h("label", {}, all, " batches and policies too"), list));
  const show = (events) => {
    fill(signs, signList(signsOf(events, run && run.run_id), run && run.run_id));
    fill(list, events.filter((event) => all.checked || !FREQUENT.has(event.type)).slice(0, 200).map((event) => h("li", { class: TROUBLE.has(event.type) ? "trouble" : null }, h("time", {}, clock(event.time)), " ", h("b", {}, event.type), " ", h("span", { class: "note" }, describe(event.data)))));
  };
  show(store.get("events") || []);
  return { onEvents: show };
}

function describe(data) {
  return Object.entries(data).filter(([name]) => name !== "advice").map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : visible(typeof value === "string" ? value : JSON.stringify(value))}`).join(" · ");
}
