// The parts of a run: environments, trainers and inference servers, each with the time since its last request.

import { fill, h, table, visible } from "./dom.js";
import { bytes, count, number, span } from "./format.js";

/** Show the parts, and keep them up to date. */
export function showParts({ container, store }) {
  const sections = ["Environments", "Trainers", "Inference servers", "Dropped groups", "Broker"].map((title) => {
    const body = h("div", {});
    return [h("section", { class: "card" }, h("h2", {}, title), body), body];
  });
  fill(container, sections.map(([section]) => section));
  const [environments, trainers, servers, dropped, broker] = sections.map(([, body]) => body);
  const show = (status) => {
    fill(environments, environmentTable(status));
    fill(trainers, trainerTable(status));
    fill(servers, [fleetTable(status), serverTable(status)]);
    fill(dropped, droppedTable(status));
    fill(broker, brokerFacts(status));
  };
  if (store.get("status")) show(store.get("status"));
  return { onStatus: show };
}

function environmentTable(status) {
  if (!status.environments.length) return h("p", { class: "note" }, "None has registered yet.");
  const rows = status.environments.map((one) => {
    const activity = one.activity;
    const slowest = activity && activity.slowest[0];
    return [
      visible(one.name),
      h("span", { class: `badge ${one.connected ? "ok" : "slow"}` }, one.connected ? "connected" : "gone"),
      `${span(one.quiet_seconds)} ago`,
      one.group_size,
      count(one.queued_sequences),
      activity ? `${activity.open_rollouts} groups, ${activity.open_requests} requests` : "not reported",
      activity && activity.usual_seconds !== null ? span(activity.usual_seconds) : "–",
      slowest ? `${visible(slowest.name)}: ${slowest.done} of ${slowest.wanted} after ${span(slowest.seconds)}${slowest.last_event ? `, ${visible(slowest.last_event)}` : ""}` : "–",
    ];
  });
  return table("Environments", ["Name", "State", "Heard", "Group size", "Queued", "In progress", "95 % take", "Slowest"], rows, { numeric: [3, 4] });
}

function trainerTable(status) {
  if (!status.trainers.length) return h("p", { class: "note" }, status.run && status.run.state === "open" ? "The trainer of this run sends no reports." : "No trainer is at work.");
  return table("Trainers", ["Run", "Heard", "Step", "In progress", "Host", "Process", "Ranks"], status.trainers.map((one) => [
    visible(one.run_id), `${span(one.quiet_seconds)} ago`, count(one.step), Object.entries(one.phases).map(([name, seconds]) => `${visible(name)} ${span(seconds)}`).join(", ") || "–", visible(one.host), one.pid, one.world_size,
  ]), { numeric: [2, 5, 6] });
}

function fleetTable(status) {
  const fleets = status.fleets || []; // a broker of an earlier release lists none
  if (!fleets.length) return null;
  return table("Inference servers by launcher", ["Launcher", "Policy", "Run", "Wanted", "Heard", "Note"], fleets.map((one) => [
    visible(one.fleet_id), visible(one.policy), count(one.running), `${count(one.wanted)}${one.followed ? "" : " (asked for)"}`, `${span(one.silent_seconds)} ago`, visible(one.note || one.fixed) || "–",
  ]), { numeric: [2, 3] });
}

function serverTable(status) {
  const tables = [registeredTable(status), seenTable(status)].filter(Boolean);
  return tables.length ? tables : h("p", { class: "note" }, "None is registered, and no environment reports on its servers.");
}

function registeredTable(status) {
  if (!status.servers.length) return null;
  const states = { serving: "ok", gone: "blocked" };
  return table("Registered inference servers", ["Server", "State", "Heard", "Policy version", "Running", "Waiting", "KV cache free", "Address"], status.servers.map((one) => [
    visible(one.server_id),
    [h("span", { class: `badge ${states[one.state] || "slow"}` }, one.state), one.reason ? h("span", { class: "note" }, visible(one.reason)) : null],
    `${span(one.quiet_seconds)} ago`,
    one.version === null ? "–" : `${count(one.version)}${one.policy === "default" ? "" : ` of ${visible(one.policy)}`}`,
    count(one.running),
    count(one.waiting),
    one.kv_free === null ? "–" : `${Math.round(100 * one.kv_free)} %`,
    visible(one.url),
  ]), { numeric: [3, 4, 5, 6] });
}

function seenTable(status) {
  const seen = status.environments.flatMap((one) => (one.activity ? one.activity.servers.map((server) => [one, server]) : []));
  if (!seen.length) return null;
  return table("Inference servers as environments see them", ["Address", "Environment", "State", "Requests in progress", "Requests so far"], seen.map(([one, server]) => [
    visible(server.url), visible(one.name), h("span", { class: `badge ${server.available ? "ok" : "blocked"}` }, server.available ? "answers" : "does not answer"), count(server.open_requests), count(server.requests),
  ]), { numeric: [3, 4] });
}

function droppedTable(status) {
  const rows = status.environments.flatMap((one) => Object.entries(one.dropped_groups).map(([reason, number]) => [visible(one.name), visible(reason), count(number), one.latest_drop ? visible(one.latest_drop.explanation) : ""]));
  if (!rows.length) return h("p", { class: "note" }, "No group was dropped.");
  return table("Dropped groups", ["Environment", "Reason", "Groups", "The latest"], rows, { numeric: [2] });
}

function brokerFacts(status) {
  const { counters } = status;
  const facts = [
    ["groups received", count(counters.groups_received_total)],
    ["sequences received", count(counters.sequences_received_total)],
    ["tokens received", count(counters.tokens_received_total)],
    ["batches formed", count(counters.batches_formed_total)],
    ["batches committed", count(counters.batches_committed_total)],
    ["expired as too old", count(counters.groups_expired_total)],
    ["repeats recognised", count(counters.groups_duplicate_total)],
    ["answered 503, queue full", count(counters.pressure_total)],
    ["store", bytes(status.store.bytes)],
    ["uncommitted batches", number(Object.keys(status.batches.uncommitted).length)],
  ];
  return h("dl", { class: "facts-list" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
