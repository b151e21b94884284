// One group: its sequences side by side, sorted by reward, each as tokens or as chat; links to a token; the command that
// trains the batch again; a sequence as a test case.

import { MODES, Scale } from "./colours.js";
import { copyable, fill, h, json, visible } from "./dom.js";
import { clock, count, number } from "./format.js";
import { mean } from "./rollouts.js";
import { hashOf } from "./store.js";
import { modePicker, TokenStrip, WINDOW } from "./tokens.js";

/** Show a group; the address may name a sequence and a token. */
export async function showGroup({ container, source, run, route }) {
  // Numbers alone: a link of another site to this page may name anything, such as ../../../../reset_data.
  const path = `v1/runs/${encodeURIComponent(run.run_id)}/batches/${Number(route.batch)}/groups/${Number(route.group)}`;
  const group = await source.get(path);
  const place = { view: "group", run: run.run_id, batch: route.batch, group: route.group };
  const order = group.samples.map((_, index) => index).sort((a, b) => group.samples[b].reward - group.samples[a].reward || a - b);
  const wanted = route.sample === undefined ? null : Number(route.sample);
  const legend = h("div", {});
  const columns = [];
  const scale = new Scale(MODES.find((one) => one.name === route.colour) || MODES[0], () => {
    fill(legend, scale.legend());
    for (const column of columns) column.render();
  });
  fill(legend, scale.legend());
  columns.push(...order.map((index) => new Column({ source, path, group, index, place, scale })));
  const picker = modePicker(scale.mode.name, (picked) => scale.set(picked), legend);
  fill(container,
    heading(group, run, place),
    replay(group),
    picker,
    h("div", { class: "siblings", role: "list", "aria-label": "Sequences of the group, best reward first" }, columns.map((column) => column.element)),
    h("details", { class: "more" }, h("summary", {}, "Other fields of the group"), h("pre", { tabindex: "0" }, visible(JSON.stringify(group.more, null, 1)))));
  const watcher = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => entry.target.column.open()), { rootMargin: "300px" });
  for (const column of columns) {
    column.element.column = column;
    watcher.observe(column.element);
  }
  const chosen = columns.find((column) => column.index === wanted);
  if (chosen) {
    chosen.mark();
    await chosen.open(route.token === undefined ? null : Number(route.token));
    chosen.show();
  }
  return { close: () => watcher.disconnect() };
}

function heading(group, run, place) {
  const { summary } = group;
  const where = summary.batch ? `Batch ${summary.batch}, group ${summary.group}` : `Queued group ${summary.group}`;
  return h("header", { class: "group-head" },
    h("p", { class: "crumbs" }, h("a", { href: hashOf({ view: "rollouts", run: run.run_id }) }, "Rollouts"), " / ", h("a", { href: hashOf({ view: "rollouts", run: run.run_id, batch: place.batch }) }, summary.batch ? `batch ${summary.batch}` : "queue")),
    h("h2", {}, where),
    h("p", { class: "note" }, `${visible(summary.environment)} · mean reward ${number(mean(summary.rewards))} · ${count(summary.tokens)} tokens · came ${clock(summary.arrived_at)}`, summary.equal_rewards ? h("span", { class: "badge slow" }, "all rewards equal: nothing is learned from it") : null));
}

function replay(group) {
  const batch = group.summary.batch;
  const body = group.replay
    ? [h("p", { class: "note" }, "Trains this batch again from the checkpoint before it, without broker or server, and prints the step's metrics: the same bytes each time. Add --checkpoint none if there is no such checkpoint."), copyable(group.replay, "Command that replays this step")]
    : [h("p", { class: "note" }, batch ? "This run does not save its batches. Start it with --save-batches --checkpoint-interval 1, and this shows the command that trains the batch again, to the bit." : "The group is in no batch yet.")];
  return h("details", { class: "more replay" }, h("summary", {}, "Replay this step"), body);
}

/** One sequence of the group. */
class Column {
  constructor({ source, path, group, index, place, scale }) {
    this.source = source;
    this.path = `${path}/samples/${index}`;
    this.group = group;
    this.index = index;
    this.place = place;
    this.scale = scale;
    const sample = group.samples[index];
    this.body = h("div", {});
    this.link = h("a", { href: hashOf({ ...place, sample: index }) }, `Sequence ${index}`);
    const chat = group.messages ? group.messages[index] : null;
    this.element = h("div", { class: "sibling", role: "listitem", "aria-label": `Sequence ${index}, reward ${number(sample.reward)}` },
      h("header", {},
        h("h3", {}, this.link),
        h("p", {}, h("span", { class: "reward" }, number(sample.reward)), ` reward · ${count(sample.sampled_tokens)} of ${count(sample.tokens)} tokens sampled`, versions(sample), sample.finish ? ` · ${visible(sample.finish)}` : "")),
      h("div", { class: "actions" }, h("button", { type: "button", class: "quiet", onclick: () => this.testCase() }, "As a test case")),
      this.body,
      chat ? h("details", { class: "more", open: false }, h("summary", {}, "Chat"), chat.map(message)) : null);
  }

  /** Mark the sequence as the one that the address names. */
  mark() {
    for (const one of this.element.parentElement.children) one.removeAttribute("aria-current");
    this.element.setAttribute("aria-current", "true");
  }

  /** Scroll the row of sequences to this one, and the page as little as that needs. */
  show() {
    this.element.scrollIntoView({ block: "nearest", inline: "center" });
  }

  /** Load the tokens; with a position, choose that token. */
  async open(position = null) {
    if (!this.strip) {
      this.strip = new TokenStrip({
        load: (start) => this.source.get(this.path, { start, count: WINDOW }),
        total: this.group.samples[this.index].tokens,
        label: `Tokens of sequence ${this.index}`,
        scale: this.scale,
        onChoose: (token) => {
          this.mark();
          history.replaceState(null, "", hashOf({ ...this.place, sample: this.index, token }));
        },
      });
      fill(this.body, this.strip.element);
      await this.strip.show(position ?? 0, position !== null);
    } else if (position !== null) await this.strip.show(position, true);
  }

  render() {
    if (this.strip) this.strip.render();
  }

  async testCase() {
    const text = json(await this.asTestCase());
    const box = h("div", { class: "test-case" }, h("p", { class: "note" }, "The sequence as it was trained: prompt, completion, messages, tokens, masks, logprobs and score. The reference answer is not in it, but among the other fields of the group, if its environment sends one."), copyable(text, "Test case as JSON"));
    const old = this.element.querySelector(".test-case");
    if (old) old.remove();
    else this.element.querySelector(".actions").after(box);
  }

  async asTestCase() {
    const sample = this.group.samples[this.index];
    const all = { tokens: [], sampled: [], sampler_logprobs: [], versions: [], texts: {} };
    for (let start = 0; start < sample.tokens; start += WINDOW) {
      const part = await this.source.get(this.path, { start, count: WINDOW });
      for (const name of ["tokens", "sampled", "sampler_logprobs", "versions"]) all[name].push(...(part[name] || part.tokens.map(() => null)));
      Object.assign(all.texts, part.texts);
    }
    const textOf = (sampled) => all.tokens.filter((_, at) => all.sampled[at] === sampled).map((token) => all.texts[token] ?? "").join("");
    return {
      environment: this.group.summary.environment,
      run: this.group.run_id,
      batch: this.group.summary.batch,
      group: this.group.summary.group,
      sample: this.index,
      score: sample.reward,
      prompt: textOf(false) || null,
      completion: textOf(true) || null,
      messages: this.group.messages ? this.group.messages[this.index] : null,
      tokens: all.tokens,
      masks: all.tokens.map((token, at) => (all.sampled[at] ? token : -100)),
      inference_logprobs: all.sampler_logprobs.map((value) => value ?? 1.0),
      policy_versions: all.versions,
    };
  }
}

function versions(sample) {
  if (sample.oldest_version === null) return "";
  return sample.oldest_version === sample.newest_version ? ` · version ${sample.oldest_version}` : ` · versions ${sample.oldest_version}–${sample.newest_version}`;
}

function message(turn) {
  const content = typeof turn.content === "string" || turn.content === null || turn.content === undefined ? turn.content || "" : JSON.stringify(turn.content, null, 1);
  const calls = turn.tool_calls && turn.tool_calls.length ? JSON.stringify(turn.tool_calls, null, 1) : "";
  return h("section", { class: `turn ${turn.role === "assistant" ? "sampled" : ""}` }, h("h4", {}, visible(turn.role || "message")), h("pre", { tabindex: "0" }, visible(content)), calls ? h("pre", { tabindex: "0" }, visible(calls)) : null);
}
