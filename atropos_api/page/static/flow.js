// The first screen: the flow from environments to published weights, what the run waits for in words, and the edge.

import { fill, h, setText, table, visible } from "./dom.js";
import { count, number, rate, span } from "./format.js";

const EDGES = ["environment-inference", "inference-broker", "broker-trainer", "trainer-publish"];
const MOST_SLOWEST = 5;
const STATES = { blocked: "blocked", slow: "slower side", ok: "moving" };

/** Build the view; return a function that shows a status. */
export function makeFlow(container) {
  const verdict = h("section", { class: "verdict", "aria-labelledby": "verdict" },
    h("p", { class: "kicker" }), h("h2", { id: "verdict" }), h("p", { class: "detail" }), h("p", { class: "advice" }));
  const chain = h("ol", { class: "chain", "aria-label": "Flow from environments to published weights" });
  const notes = h("ul", { class: "notes", "aria-label": "Also seen" });
  const slowest = h("section", { class: "card slowest" });
  fill(container, verdict, chain, notes, slowest);
  return (status) => {
    showVerdict(verdict, status.flow.diagnosis.finding);
    showChain(chain, status);
    fill(notes, status.flow.diagnosis.notes.map((note) => h("li", {}, badge(note), visible(note.headline), note.advice ? h("span", { class: "note" }, ` ${visible(note.advice)}`) : null)));
    notes.hidden = status.flow.diagnosis.notes.length === 0;
    showSlowest(slowest, status);
  };
}

/** The groups that have been open for longest, against what groups of their environment usually take. */
function showSlowest(section, status) {
  const open = status.environments.filter((one) => one.connected && one.activity).flatMap((one) => one.activity.slowest.map((group) => ({ group, environment: one, times: one.activity.usual_seconds ? group.seconds / one.activity.usual_seconds : null })));
  const shown = open.filter(({ group }) => group.done < group.wanted).sort((a, b) => (b.times ?? 0) - (a.times ?? 0) || b.group.seconds - a.group.seconds).slice(0, MOST_SLOWEST);
  section.hidden = shown.length === 0;
  fill(section, h("h2", {}, "Slowest open groups"), table("Slowest open groups", ["Group", "Environment", "Done", "Open for", "95 % take", "Waits for"], shown.map(({ group, environment, times }) => [
    visible(group.name),
    visible(environment.name),
    `${group.done} of ${group.wanted}`,
    span(group.seconds),
    times === null ? "not known yet" : `${span(environment.activity.usual_seconds)}: ${number(times)} times that`,
    waitingFor(group),
  ]), { numeric: [2, 3] }));
}

/** The last event of each unfinished member of a group, by its index where the environment reports one. */
export function waitingFor(group) {
  const ago = (event, seconds) => (event ? `${visible(event)}, ${span(seconds)} ago` : `no event for ${span(seconds)}`);
  if (group.waiting.length) return h("ul", {}, group.waiting.map((one) => h("li", {}, `rollout ${one.member}: ${ago(one.last_event, one.seconds)}`)));
  return group.last_event ? ago(group.last_event, group.last_event_seconds) : "–";
}

function badge({ rule, severity }) {
  if (rule === "starting") return h("span", { class: "badge" }, "starting");
  return h("span", { class: `badge ${severity}` }, severity === "ok" ? "well" : STATES[severity]);
}

function showVerdict(section, finding) {
  const [kicker, headline, detail, advice] = section.children;
  section.dataset.severity = finding.severity;
  section.dataset.rule = finding.rule;
  section.dataset.edge = finding.edge || "";
  fill(kicker, badge(finding), finding.edge ? ` on ${finding.edge.replace("-", " → ")}` : "", finding.seconds ? ` for ${span(finding.seconds)}` : "");
  setText(headline, visible(finding.headline));
  setText(detail, visible(finding.detail));
  setText(advice, finding.advice ? `What may help: ${visible(finding.advice)}` : "");
}

function showChain(chain, status) {
  const finding = status.flow.diagnosis.finding;
  const stages = [environments(status), inference(status), broker(status), trainer(status), publish(status)];
  const rates = edgeRates(status);
  fill(chain, stages.flatMap((stage, index) => [
    h("li", { class: "stage" }, h("h3", {}, stage.title), h("p", { class: "big" }, stage.big), stage.lines.filter(Boolean).map((line) => h("p", { class: "line" }, line))),
    index < EDGES.length ? edge(EDGES[index], rates[index], finding) : null,
  ]));
}

function edge(name, rates, finding) {
  const state = finding.edge === name ? finding.severity : "ok";
  const words = state === "ok" ? null : h("span", { class: "edge-state" }, state === "blocked" ? "▮▮ blocked here" : "◔ slower side");
  return h("li", { class: `edge ${state}`, "data-edge": name, "aria-label": `${name.replace("-", " to ")}: ${rates.join(", ")}${state === "ok" ? "" : `, ${STATES[state]}`}` },
    h("span", { class: "rates" }, rates.map((text) => h("span", {}, text))), h("span", { class: "arrow", "aria-hidden": "true" }), words);
}

function edgeRates(status) {
  const rates = status.flow.rates;
  const of = (name, unit) => rate(rates ? rates[name] : null, unit);
  return [
    [of("requests", "requests")],
    [of("groups", "groups"), of("tokens", "tokens")],
    [of("batches", "batches")],
    [of("publishes", "publishes")],
  ];
}

function environments(status) {
  const connected = status.environments.filter((one) => one.connected);
  const reporting = connected.filter((one) => one.activity);
  const open = reporting.reduce((sum, one) => sum + one.activity.open_rollouts, 0);
  return {
    title: "Environments",
    big: `${connected.length}`,
    lines: [
      connected.length === 1 ? visible(connected[0].name) : "connected",
      reporting.length ? `${count(open)} groups in collection` : null,
      reporting.some((one) => one.activity.evaluating) ? "evaluating" : null,
    ],
  };
}

function inference(status) {
  const reporting = status.environments.filter((one) => one.connected && one.activity);
  const servers = new Map(reporting.flatMap((one) => one.activity.servers.map((server) => [server.url, server])));
  const open = reporting.reduce((sum, one) => sum + one.activity.open_requests, 0);
  const idle = Math.min(...reporting.map((one) => one.activity.idle_seconds));
  return {
    title: "Inference",
    big: reporting.length ? `${count(open)}` : "–",
    lines: [
      reporting.length ? "requests in progress" : "no environment reports on it",
      servers.size ? `${servers.size} ${servers.size === 1 ? "server" : "servers"}` : null,
      loadOf(status.servers.filter((one) => one.state === "serving" || one.state === "draining")),
      reporting.length && open === 0 && idle >= 1 ? `idle for ${span(idle)}` : null,
    ],
  };
}

/** The load of the registered servers that answer: that of the fullest one, which a mean would hide. */
function loadOf(servers) {
  if (!servers.length) return null;
  const waiting = servers.reduce((sum, one) => sum + one.waiting, 0);
  const free = servers.map((one) => one.kv_free).filter((share) => share !== null);
  return [waiting ? `${count(waiting)} wait inside` : null, free.length ? `least free KV cache ${Math.round(100 * Math.min(...free))} %` : null].filter(Boolean).join(", ");
}

function broker(status) {
  const { outstanding, limit } = status.flow;
  const unit = status.run ? status.run.unit : "sequences";
  return {
    title: "Broker",
    big: limit ? `${count(outstanding)} / ${count(limit)}` : count(status.queue.sequences),
    lines: [
      limit ? `${unit} queued or in batches` : "sequences queued",
      status.queue.oldest_age_seconds !== null ? `the oldest ${span(status.queue.oldest_age_seconds)}` : null,
      limit ? meter(outstanding / limit) : null,
    ],
  };
}

function meter(share) {
  return h("meter", { min: "0", max: "1", value: String(Math.min(1, share)), "aria-label": "Queue against its budget" }, `${Math.round(100 * share)} %`);
}

function trainer(status) {
  const run = status.run;
  if (!run) return { title: "Trainer", big: "–", lines: ["no run"] };
  const report = status.trainers.find((one) => one.run_id === run.run_id);
  const phases = report ? Object.entries(report.phases).sort((a, b) => b[1] - a[1]) : [];
  const of = run.num_steps ? ` / ${count(run.num_steps)}` : "";
  return {
    title: "Trainer",
    big: `${count(run.current_step)}${of}`,
    lines: [
      "steps",
      run.state !== "open" ? run.state : phases.length ? phases.map(([name, seconds]) => `${name} ${span(seconds)}`).join(", ") : null,
      run.state === "open" && run.last_step_seconds !== null ? `last step ${span(run.last_step_seconds)} ago` : null,
      run.num_steps ? h("progress", { max: String(run.num_steps), value: String(Math.min(run.current_step, run.num_steps)), "aria-label": "Steps trained" }) : null,
    ],
  };
}

function publish(status) {
  const run = status.run;
  const held = run ? run.holds[0] : null;
  return {
    title: "Policy",
    big: run && run.policy_version !== null ? `v${number(run.policy_version)}` : "–",
    lines: [
      run && run.published_at ? `published ${span(status.time - run.published_at)} ago` : run && run.state === "open" ? "not published yet" : null,
      held ? `held for ${span(held.held_seconds)}: ${visible(held.reason || "evaluation")}` : null,
    ],
  };
}
