// The list of groups: by batch, environment, reward and remark, and those from which nothing was learned.

import { fill, h, table, visible } from "./dom.js";
import { clock, count, number } from "./format.js";
import { hashOf } from "./store.js";

const ORDERS = { newest: "newest first", "lowest-reward": "lowest reward first", "highest-reward": "highest reward first", "widest-reward": "widest spread first" };
const ONLY = { "": "all groups", equal: "all rewards equal", mixed: "rewards differ", failed: "a reward of 0 or less", remarked: "an error or another remark" };

/** Show the groups of a run; the choice is in the address. */
export async function showRollouts({ container, source, run, route, environments }) {
  const go = (changes) => (location.hash = hashOf({ view: "rollouts", run: run.run_id, ...chosen, ...changes }));
  const chosen = { batch: route.batch, environment: route.environment, order: route.order, only: route.only };
  const list = h("div", {});
  fill(container, filters(chosen, environments(), go), list);
  const update = async () => {
    const found = await source.get(`v1/runs/${encodeURIComponent(run.run_id)}/groups`, { batch: chosen.batch, environment_id: chosen.environment, order: chosen.order, only: chosen.only, limit: 200 });
    fill(list, summary(found, chosen), found.groups.length ? rows(run, found.groups) : h("p", { class: "note" }, emptyReason(chosen)));
  };
  await update();
  return { update: chosen.order && chosen.order !== "newest" ? null : update };
}

function emptyReason(chosen) {
  if (chosen.only) return `None of the groups that are kept fits: ${ONLY[chosen.only] ?? chosen.only}.`;
  if (chosen.batch === "0") return "No group is queued.";
  return chosen.batch ? `No group of batch ${chosen.batch} is kept; --recent-bytes of the broker sets how much is, and --save-batches of the trainer saves all.` : "No group has come yet.";
}

function summary(found, chosen) {
  const of = found.groups.length < found.total ? ` of ${count(found.total)}` : "";
  return h("p", { class: "note" }, `${count(found.groups.length)}${of} groups${chosen.batch === "0" ? " in the queue" : chosen.batch ? ` of batch ${chosen.batch}` : " of the newest batches"}`);
}

function filters(chosen, environments, go) {
  const select = (label, name, options) => h("label", {}, `${label} `, h("select", { onchange: (event) => go({ [name]: event.target.value }) }, Object.entries(options).map(([value, text]) => h("option", { value, selected: (chosen[name] || "") === value }, text))));
  const batch = h("input", { type: "number", min: "0", inputmode: "numeric", value: chosen.batch ?? "", placeholder: "all", onchange: (event) => go({ batch: event.target.value }) });
  return h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "Batch ", batch),
    select("Environment", "environment", { "": "all", ...Object.fromEntries(environments.map((one) => [one.id, visible(one.name)])) }),
    select("Show", "only", ONLY),
    select("Order", "order", { "": ORDERS.newest, ...Object.fromEntries(Object.entries(ORDERS).slice(1)) }));
}

function rows(run, groups) {
  const rewards = groups.flatMap((group) => group.rewards); // too many for the arguments of one call
  const [low, high] = [rewards.reduce((least, one) => Math.min(least, one), 0), rewards.reduce((most, one) => Math.max(most, one), 1)];
  const link = (group) => h("a", { href: hashOf({ view: "group", run: run.run_id, batch: group.batch, group: group.group }) }, group.batch ? `${group.batch} · ${group.group}` : `queued ${group.group}`);
  return table("Groups", ["Batch · group", "Environment", "Rewards", "Mean", "Tokens", "Version", "Came", "Remarks"], groups.map((group) => [
    link(group),
    visible(group.environment),
    rewardBars(group.rewards, low, high),
    number(mean(group.rewards)),
    count(group.tokens),
    group.oldest_version ?? "–",
    clock(group.arrived_at),
    [group.equal_rewards ? h("span", { class: "badge slow" }, "equal") : null, ...Object.entries(group.remarks).map(([remark, times]) => h("span", { class: "badge slow" }, `${times} ${visible(remark)}`)), group.has_values ? h("span", { class: "badge ok", title: "the trainer reported values of these tokens" }, "values") : null],
  ]), { numeric: [3, 4, 5] });
}

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** Rewards as bars between the lowest and the highest of all groups in the list, at least from 0 to 1. */
function rewardBars(rewards, low, high) {
  const text = rewards.map(number).join(", ");
  const size = (reward) => Math.round((8 * (reward - low)) / (high - low || 1));
  return h("span", { class: "bars" }, h("span", { class: "unseen" }, `rewards ${text}`), h("span", { "aria-hidden": "true", title: text }, rewards.slice(0, 32).map((reward) => h("i", { class: `bar b${size(reward)}` }))));
}
