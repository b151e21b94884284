// Colours of tokens by a value: eleven classes from strongly negative to strongly positive, each also with an underline
// of its own, so that a reader who sees no difference between the colours sees the pattern.

import { h } from "./dom.js";
import { number } from "./format.js";

export const STEPS = 5;

const TRAINER = "The trainer reported no values for this group: --recorded-tokens sets how many it reports.";
const SENDER = "The environment did not send it.";

/** The ways to colour tokens. `values` gives a number for each token of a window, or null where there is none. */
export const MODES = [
  {
    name: "advantage",
    missing: TRAINER,
    title: "Advantage",
    help: "what the trainer pushes up (blue) or down (orange)",
    limit: (window) => Math.max(1, largest(window.advantages)),
    values: (window) => window.advantages,
  },
  {
    name: "ratio",
    missing: TRAINER,
    title: "Ratio",
    help: "policy in training over sampler, before the step; 1 is grey",
    limit: () => Math.log(1.5),
    values: (window) => difference(window),
    show: (value) => number(Math.exp(value)),
  },
  {
    name: "gap",
    missing: TRAINER,
    title: "Logprob gap",
    help: "trainer minus sampler, in nats; far from 0, the two do not hold the same weights",
    limit: (window) => Math.max(0.02, largest(difference(window))),
    values: (window) => difference(window),
  },
  {
    name: "entropy",
    missing: TRAINER,
    title: "Entropy",
    help: "of the distribution at the token, in nats; dark is undecided",
    sequential: true,
    limit: (window) => Math.max(1, largest(window.entropies)),
    values: (window) => window.entropies,
  },
  {
    name: "logprob",
    missing: SENDER,
    title: "Sampler logprob",
    help: "how unlikely the token was for its sampler; dark is surprising",
    sequential: true,
    limit: () => 6,
    values: (window) => window.sampler_logprobs && window.sampler_logprobs.map((value) => (value === null ? null : -value)),
    show: (value) => number(-value),
  },
  {
    name: "version",
    missing: SENDER,
    title: "Policy version",
    help: "the version that sampled each token",
    versions: true,
    limit: () => 1,
    values: (window) => (window.versions.some((value) => value !== null) ? window.versions : null),
    show: (value) => `v${value}`,
  },
];

function difference(window) {
  if (!window.logprobs || !window.sampler_logprobs) return null;
  return window.logprobs.map((value, index) => {
    const sampler = window.sampler_logprobs[index];
    return value === null || sampler === null ? null : value - sampler;
  });
}

function largest(values) {
  return values ? values.reduce((most, value) => (value === null ? most : Math.max(most, Math.abs(value))), 0) : 0;
}

/** One scale for all sequences of a group: it grows with their values, and calls its listeners. */
export class Scale {
  constructor(mode, onChange) {
    this.onChange = onChange;
    this.windows = [];
    this.mode = mode;
    this.fit();
  }

  set(mode) {
    this.mode = mode;
    this.fit();
    this.onChange();
  }

  /** Take a window into account. */
  include(window) {
    this.windows.push(window);
    const before = `${this.limit} ${this.order}`;
    this.fit();
    if (before !== `${this.limit} ${this.order}`) this.onChange();
  }

  fit() {
    this.limit = Math.max(...this.windows.map((window) => this.mode.limit(window)), this.windows.length ? 0 : 1);
    this.order = [...new Set(this.windows.flatMap((window) => window.versions.filter((value) => value !== null)))].sort((a, b) => a - b);
    this.known = this.windows.some((window) => this.mode.values(window));
  }

  classOf(value) {
    return classOf(this.mode, value, this.limit, this.order);
  }

  legend() {
    if (this.windows.length && !this.known) return h("p", { class: "note" }, this.mode.missing);
    return legend(this.mode, this.limit, this.order);
  }
}

/** Return the class of a value between -limit and limit, or "" for no value. */
function classOf(mode, value, limit, order) {
  if (value === null || value === undefined) return "";
  if (mode.versions) return `version-${order.indexOf(value) % 4}`;
  const step = Math.max(-STEPS, Math.min(STEPS, Math.round((STEPS * value) / limit)));
  if (mode.sequential) return `s${Math.max(0, step)}`;
  return step < 0 ? `n${-step}` : `p${step}`;
}

/** A legend with the number that each colour stands for. */
function legend(mode, limit, order) {
  const show = mode.show || number;
  const masked = h("li", {}, h("span", { class: "token masked" }, "ab"), " not sampled");
  if (mode.versions) {
    return h("ul", { class: "legend", "aria-label": "Colours" }, order.slice(0, 8).map((version, index) => h("li", {}, h("span", { class: `token version-${index % 4}` }, "ab"), ` ${show(version)}`)), masked);
  }
  const from = mode.sequential ? 0 : -STEPS;
  const steps = Array.from({ length: STEPS - from + 1 }, (_, index) => from + index);
  return h("ul", { class: "legend", "aria-label": "Colours" },
    steps.map((step) => h("li", {}, h("span", { class: `token ${classOf(mode, (step * limit) / STEPS, limit, order)}` }, "ab"), step % 5 === 0 || mode.sequential ? ` ${show((step * limit) / STEPS)}` : null)),
    masked);
}
