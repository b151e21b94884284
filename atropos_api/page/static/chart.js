// One chart over steps: lines of several metrics and runs, a band in which values are healthy, a shade for a spread.
// It can be read by keyboard: the arrow keys move a marker, whose values are read out, and Enter opens the rollouts.

import { announce, fill, h, setText } from "./dom.js";
import { count, number } from "./format.js";

const HEIGHTS = { key: 150, other: 180 };
const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A chart of lines {label, steps, values, spread}. `onOpen(step)` is called for the step that a reader chooses. */
export class Chart {
  constructor(panel, onOpen, { small = false } = {}) {
    this.panel = panel;
    this.height = small ? HEIGHTS.key : HEIGHTS.other;
    this.onOpen = onOpen;
    this.lines = [];
    this.marks = [];
    this.plot = null;
    this.at = null;
    this.canvas = h("div", { class: "plot", tabindex: "0", role: "application", "aria-label": `${panel.title}: arrow keys read the values, Enter opens the rollouts of a step`, onkeydown: (event) => this.key(event) });
    this.readout = h("p", { class: "readout" });
    this.legend = h("ul", { class: "keys" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("strong", {}, panel.title), h("span", { class: "note" }, panel.help || "")), this.canvas, this.legend, this.readout);
    this.resized = new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.width(), height: this.height }));
    this.resized.observe(this.canvas);
  }

  width() {
    return Math.max(220, this.canvas.clientWidth);
  }

  /** Show lines, and marks at the steps of signs of trouble; a new chart is made only if the lines are different ones. */
  set(lines, marks = []) {
    this.marks = marks;
    const shape = (all) => all.map((line) => `${line.label}${line.spread ? "±" : ""}`).join("|");
    const same = this.plot && shape(lines) === shape(this.lines);
    this.lines = lines;
    const data = dataOf(lines);
    if (!same) this.draw(data);
    else if (this.isZoomed() && this.plot.scales.x.min <= data[0].at(-1)) {
      this.plot.setData(data, false);
      this.plot.redraw();
    } else this.plot.setData(data);
    this.describe();
  }

  /** True if a reader has dragged a part of the steps into view: new steps leave it as it is, unless a resume has removed all of it. */
  isZoomed() {
    const { min, max } = this.plot.scales.x;
    return min > this.plot.data[0][0] || max < this.plot.data[0].at(-1);
  }

  redraw() {
    if (this.lines.length) this.draw(dataOf(this.lines));
  }

  draw(data) {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    fill(this.canvas);
    if (!this.lines.length || !data[0].length) {
      fill(this.canvas, h("p", { class: "note empty" }, "No step has reported it yet."));
      return;
    }
    const axis = { stroke: colour("--ink-2"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    this.plot = new uPlot({
      width: this.width(),
      height: this.height,
      padding: [8, 10, 0, 0],
      scales: { x: { time: false }, y: this.scale() },
      axes: [{ ...axis, size: 26, gap: 4, values: (_, splits) => splits.map((value) => (Number.isInteger(value) ? count(value) : "")) }, { ...axis, size: 52, gap: 6, values: (_, splits) => splits.map((value) => (value === null ? "" : number(value))) }],
      series: [{}, ...this.lines.flatMap((line, index) => seriesOf(line, index))],
      bands: bandsOf(this.lines),
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      hooks: {
        drawClear: [(plot) => drawHealthy(plot, this.panel.healthy)],
        draw: [(plot) => drawMarks(plot, this.marks)],
        setCursor: [(plot) => this.read(plot.cursor.idx)],
      },
    }, data, this.canvas);
    this.plot.over.addEventListener("click", () => this.open());
  }

  scale() {
    if (this.panel.log) return { distr: 3 };
    const [low, high] = [this.panel.floor, this.panel.healthy];
    return {
      range: (_, min, max) => {
        if (min === null) return [0, 1];
        const from = low === undefined ? min : Math.min(low, min);
        const pad = 0.06 * (max - from || Math.abs(max) || 1);
        const top = high && max <= high[1] && max > 0.5 * high[1] ? Math.max(max, high[1]) : max;
        return [low === undefined ? from - pad : from, top + pad];
      },
    };
  }

  describe() {
    fill(this.legend, this.lines.map((line, index) => h("li", {}, h("span", { class: `swatch line-${(index % 8) + 1}`, "aria-hidden": "true" }), ` ${line.label} `, h("b", {}, number(line.values.at(-1))))));
    const healthy = this.panel.healthy ? `healthy from ${this.panel.healthy[0]} to ${this.panel.healthy[1]}` : "";
    const trouble = this.marks.length ? `sign of trouble at step ${this.marks.join(", ")}` : "";
    setText(this.readout, [healthy, trouble].filter(Boolean).join(" · "));
  }

  read(index) {
    this.at = index;
    if (index === null || index === undefined || !this.plot) {
      this.describe();
      return;
    }
    const step = this.plot.data[0][index];
    const values = this.lines.map((line) => [line.label, valueAt(line, step)]).filter(([, value]) => value !== null);
    setText(this.readout, `step ${count(step)}: ${values.map(([label, value]) => `${label} ${number(value)}`).join(", ")}`);
  }

  key(event) {
    if (!this.plot) return;
    const last = this.plot.data[0].length - 1;
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 };
    let to = null;
    if (event.key in moves) to = (this.at ?? (moves[event.key] > 0 ? -1 : last + 1)) + moves[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else if (event.key === "Enter") this.open();
    if (to === null) return;
    event.preventDefault();
    to = Math.max(0, Math.min(last, to));
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][to], "x"), top: 10 });
    this.read(to);
    announce(this.readout.textContent);
  }

  open() {
    if (this.plot && this.at !== null && this.at !== undefined && this.onOpen) this.onOpen(this.plot.data[0][this.at]);
  }

  destroy() {
    this.resized.disconnect();
    if (this.plot) this.plot.destroy();
  }
}

function seriesOf(line, index) {
  const stroke = colour(COLOURS[index % COLOURS.length]);
  const drawn = { label: line.label, stroke, width: 1.8, dash: line.dash ? [6, 4] : undefined, spanGaps: true, points: { show: line.steps.length < 60, size: 4, stroke, fill: stroke } };
  if (!line.spread) return [drawn];
  const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
  return [drawn, { ...edge, label: `${line.label} +` }, { ...edge, label: `${line.label} −` }];
}

function bandsOf(lines) {
  const bands = [];
  let at = 1;
  lines.forEach((line, index) => {
    if (line.spread) bands.push({ series: [at + 1, at + 2], fill: `${colour(COLOURS[index % COLOURS.length])}22` });
    at += line.spread ? 3 : 1;
  });
  return bands;
}

/** The lines as columns over all steps that any of them has. */
function dataOf(lines) {
  const tables = lines.map((line) => {
    if (!line.spread) return [line.steps, line.values];
    // Of a long run the spread is told at other steps than the line: each was reduced to extremes of its own.
    const spread = line.steps.map((step) => line.spread.values[Math.max(0, indexAt(line.spread, step))]);
    return [line.steps, line.values, line.values.map((value, at) => value + spread[at]), line.values.map((value, at) => value - spread[at])];
  });
  return tables.length ? uPlot.join(tables) : [[]];
}

/** The value of a line at a step, or null. */
function valueAt(line, step) {
  const at = indexAt(line, step);
  return line.steps[at] === step ? line.values[at] : null;
}

/** The index of the last step of a line up to this one, or -1; steps rise. */
function indexAt(line, step) {
  let [low, high] = [0, line.steps.length - 1];
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (line.steps[middle] <= step) low = middle + 1;
    else high = middle - 1;
  }
  return high;
}

function drawHealthy(plot, healthy) {
  if (!healthy) return;
  const { left, top, width, height } = plot.bbox;
  const y = (value) => plot.valToPos(value, "y", true);
  const from = Math.max(top, Math.min(top + height, y(healthy[1])));
  const lowest = healthy[0] <= 0 && plot.scales.y.distr === 3 ? top + height : y(healthy[0]);
  const to = Math.max(top, Math.min(top + height, lowest));
  plot.ctx.save();
  plot.ctx.fillStyle = colour("--healthy");
  plot.ctx.fillRect(left, from, width, Math.max(0, to - from));
  plot.ctx.restore();
}

/** A dashed line at each step at which a sign of trouble appeared. */
function drawMarks(plot, steps) {
  const { top, height } = plot.bbox;
  plot.ctx.save();
  plot.ctx.strokeStyle = colour("--blocked");
  plot.ctx.setLineDash([4, 4]);
  for (const step of steps) {
    const x = Math.round(plot.valToPos(step, "x", true));
    plot.ctx.beginPath();
    plot.ctx.moveTo(x, top);
    plot.ctx.lineTo(x, top + height);
    plot.ctx.stroke();
  }
  plot.ctx.restore();
}
