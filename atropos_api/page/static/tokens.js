// The tokens of one sequence, in windows of 2,000: each is an element whose text is set as text. The arrow keys move from
// token to token, and a line below says all that is known of the chosen token.

import { MODES } from "./colours.js";
import { announce, fill, h, setText, visible } from "./dom.js";
import { count, number } from "./format.js";

export const WINDOW = 2000;

/** A strip of tokens in the colours of a scale. `load(start)` returns a window, `onChoose(position)` is called for a choice. */
export class TokenStrip {
  constructor({ load, total, label, scale, onChoose }) {
    this.load = load;
    this.total = total;
    this.scale = scale;
    this.onChoose = onChoose;
    this.chosen = null;
    this.window = null;
    this.list = h("div", { class: "tokens", role: "listbox", tabindex: "0", "aria-label": label, onkeydown: (event) => this.key(event), onclick: (event) => this.click(event) });
    this.facts = h("p", { class: "facts", role: "status" }, "Choose a token to see its numbers.");
    this.pages = h("div", { class: "pages" });
    this.element = h("div", { class: "strip" }, this.pages, this.list, this.facts);
  }

  /** Show the window in which a position is, and choose that token if `choose` is set. */
  async show(position = 0, choose = false) {
    const start = Math.floor(Math.min(position, Math.max(0, this.total - 1)) / WINDOW) * WINDOW;
    if (!this.window || this.window.start !== start) {
      try {
        this.window = await this.load(start);
      } catch (error) {
        fill(this.list, h("p", { class: "problem" }, visible(error.message)));
        return;
      }
      this.total = this.window.total;
      this.chosen = null;
      this.scale.include(this.window);
    }
    this.render();
    if (choose) this.choose(position - start, { scroll: true });
  }

  /** Draw the window again, in the current colours. */
  render() {
    const window = this.window;
    if (!window) return;
    const values = this.scale.mode.values(window);
    const nodes = window.tokens.map((token, index) => {
      const text = textOf(window, index);
      const classes = ["token", window.sampled[index] ? "" : "masked", values ? this.scale.classOf(values[index]) : ""];
      return h("span", { class: classes.filter(Boolean).join(" "), role: "option", id: this.idOf(index), "aria-selected": index === this.chosen ? "true" : "false" }, text);
    });
    fill(this.list, nodes.flatMap((node, index) => (endsLine(window, index) ? [node, h("br")] : [node])));
    this.nodes = nodes;
    this.renderPages();
  }

  renderPages() {
    const windows = Math.ceil(this.total / WINDOW);
    if (windows <= 1) {
      fill(this.pages);
      return;
    }
    const at = this.window.start;
    const button = (text, start, enabled) => h("button", { type: "button", disabled: !enabled, onclick: () => this.show(start) }, text);
    fill(this.pages, button("◂ earlier", at - WINDOW, at > 0), h("span", {}, ` tokens ${count(at)} to ${count(Math.min(this.total, at + WINDOW) - 1)} of ${count(this.total)} `), button("later ▸", at + WINDOW, at + WINDOW < this.total));
  }

  idOf(index) {
    this.prefix = this.prefix || `t${Math.random().toString(36).slice(2, 8)}`;
    return `${this.prefix}-${index}`;
  }

  click(event) {
    const node = event.target.closest(".token");
    if (node && this.nodes) this.choose(this.nodes.indexOf(node));
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100 };
    const last = this.nodes ? this.nodes.length - 1 : 0;
    let to = null;
    if (event.key in moves) to = (this.chosen ?? -1) + moves[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    if (to === null) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, to)), { scroll: true });
  }

  choose(index, { scroll = false } = {}) {
    if (!this.nodes || !this.nodes[index]) return;
    if (this.nodes[this.chosen]) this.nodes[this.chosen].setAttribute("aria-selected", "false");
    this.chosen = index;
    const node = this.nodes[index];
    node.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", node.id);
    if (scroll) node.scrollIntoView({ block: "nearest" });
    const facts = factsOf(this.window, index);
    setText(this.facts, facts);
    announce(facts);
    if (this.onChoose) this.onChoose(this.window.start + index);
  }
}

function textOf(window, index) {
  const token = window.tokens[index];
  const text = window.texts[token];
  if (text === undefined) return `⟨${token}⟩`;
  return visible(text.replace(/\n/g, "⏎").replace(/\t/g, "⇥")) || "∅";
}

function endsLine(window, index) {
  return (window.texts[window.tokens[index]] || "").includes("\n");
}

/** All that is known of one token, as a sentence. */
export function factsOf(window, index) {
  const at = (column) => (window[column] ? window[column][index] : null);
  const parts = [`Token ${window.start + index}: ${JSON.stringify(textOf(window, index))} (id ${window.tokens[index]})`];
  if (!window.sampled[index]) parts.push("not sampled by the model");
  const named = { advantage: at("advantages"), "trainer's logprob": at("logprobs"), "sampler's logprob": at("sampler_logprobs"), entropy: at("entropies") };
  for (const [name, value] of Object.entries(named)) if (value !== null && value !== undefined) parts.push(`${name} ${number(value)}`);
  const [now, then] = [at("logprobs"), at("sampler_logprobs")];
  if (now !== null && then !== null && now !== undefined && then !== undefined) parts.push(`ratio ${number(Math.exp(now - then))}`);
  if (window.versions[index] !== null) parts.push(`policy version ${window.versions[index]}`);
  return parts.join(" · ");
}

/** Buttons for the ways to colour tokens. */
export function modePicker(name, onPick, legend) {
  const buttons = MODES.map((mode) => h("label", { title: mode.help }, h("input", { type: "radio", name: "colour", value: mode.name, checked: mode.name === name, onchange: () => onPick(mode) }), ` ${mode.title}`));
  return h("fieldset", { class: "modes" }, h("legend", {}, "Colour tokens by"), buttons, legend);
}
