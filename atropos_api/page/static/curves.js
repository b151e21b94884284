// Panels of curves: those of the declared list, several runs over each other, and any other metric on request.

import { Chart } from "./chart.js";
import { add, fill, h, visible } from "./dom.js";
import { hashOf } from "./store.js";

const MOST_RUNS = 4;
const MOST_SHADES = 4; // more shades over each other hide the lines

/** Show panels in `container`. `runs` are the runs to draw, the first one solid. Return {update, redraw, close}. */
export class Panels {
  constructor({ container, panels, cache, runs, environments, signs, onProblem, small = false }) {
    this.cache = cache;
    this.runs = runs;
    this.environments = environments;
    this.signs = signs;
    this.onProblem = onProblem;
    this.visible = new Set();
    this.charts = panels.map((panel) => new Chart(panel, (step) => this.open(step), { small }));
    this.watcher = new IntersectionObserver((entries) => this.see(entries), { rootMargin: "200px" });
    for (const chart of this.charts) {
      chart.element.chart = chart;
      this.watcher.observe(chart.element);
    }
    add(container, this.charts.map((chart) => chart.element));
  }

  open(step) {
    location.hash = hashOf({ view: "rollouts", run: this.runs[0].run_id, batch: step });
  }

  see(entries) {
    for (const entry of entries) {
      if (entry.isIntersecting) this.visible.add(entry.target.chart);
      else this.visible.delete(entry.target.chart);
    }
    this.update([...entries].filter((entry) => entry.isIntersecting).map((entry) => entry.target.chart));
  }

  /** Read new values and draw the charts that are in sight. */
  async update(charts = [...this.visible]) {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    try {
      await this.refresh(charts);
    } catch (error) {
      this.onProblem(error);
    } finally {
      this.busy = false;
    }
    if (this.again) {
      this.again = false;
      await this.update();
    }
  }

  async refresh(charts) {
    const wanted = new Map(charts.map((chart) => [chart, this.namesOf(chart.panel)]));
    const names = [...new Set([...wanted.values()].flat().flatMap((one) => [one.name, one.spread].filter(Boolean)))];
    if (!names.length) return;
    const found = [];
    for (const run of this.runs) found.push(await this.cache.read(run.run_id, names));
    const marks = this.signs(this.runs[0].run_id);
    for (const [chart, shown] of wanted) {
      const steps = marks.filter((mark) => mark.data.sign === chart.panel.sign).map((mark) => mark.data.step);
      chart.set(this.linesOf(shown, found), steps);
    }
  }

  /** The metrics of a panel with their labels; a name with {id} stands for one of each environment. */
  namesOf(panel) {
    return panel.names.flatMap((name) => {
      if (!name.includes("{id}")) return [{ name, spread: panel.spread, label: labelOf(name) }];
      return this.environments().map((one) => ({ name: name.replace("{id}", one.id), spread: panel.spread && panel.spread.replace("{id}", one.id), label: visible(one.name) }));
    });
  }

  linesOf(shown, found) {
    const several = this.runs.length > 1;
    return this.runs.flatMap((run, index) => shown.map(({ name, spread, label }) => {
      const line = found[index][name];
      const around = spread && !several && shown.length <= MOST_SHADES ? found[index][spread] : null;
      return { ...line, label: several ? `${visible(run.name)}: ${label}` : label, dash: index > 0, spread: around && around.steps.length ? around : null };
    })).filter((line) => line.steps.length);
  }

  redraw() {
    for (const chart of this.charts) chart.redraw();
  }

  /** Show only the panels that have each of these words in their title or their metrics' names. */
  filter(words) {
    for (const chart of this.charts) {
      const text = [chart.panel.title, ...chart.panel.names].join(" ").toLowerCase();
      chart.element.hidden = !words.every((word) => text.includes(word));
    }
  }

  close() {
    this.watcher.disconnect();
    for (const chart of this.charts) chart.destroy();
  }
}

function labelOf(name) {
  return name.includes("/") ? name.slice(name.indexOf("/") + 1).replace(/_/g, " ") : name;
}

/** The view of all curves. */
export async function showCurves({ container, store, source, cache, run, route, panels, environments, signs, onProblem }) {
  const runs = (store.get("runs") || []).filter((one) => one.has_metrics);
  const others = (route.over || "").split(",").map((id) => runs.find((one) => one.run_id === id)).filter((one) => one && one.run_id !== run.run_id);
  const chosen = [run, ...others].slice(0, MOST_RUNS);
  const known = await source.get(`v1/runs/${encodeURIComponent(run.run_id)}/metrics`);
  const declared = new Set(panels.flatMap((panel) => [...panel.names, panel.spread].filter(Boolean)));
  const rest = Object.keys(known.latest).filter((name) => !declared.has(name) && !/^env\//.test(name)).sort();
  const grid = h("div", { class: "charts" });
  const more = h("div", { class: "charts" });
  const search = h("input", { type: "search", placeholder: "such as kl or length", oninput: () => filter() });
  const hidden = h("details", { class: "more", ontoggle: (event) => event.target.open && !shown.rest && openRest() }, h("summary", {}, `All other metrics (${rest.length})`), more);
  fill(container, runPicker(runs, run, others), h("label", { class: "search" }, "Only metrics named ", search), grid, hidden);
  const shared = { cache, runs: chosen, environments, signs, onProblem };
  const shown = { all: new Panels({ ...shared, container: grid, panels }), rest: null };
  const openRest = () => {
    shown.rest = new Panels({ ...shared, container: more, panels: rest.map((name) => ({ title: name, names: [name], help: "" })) });
    filter();
  };
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) hidden.open = true;
    each((one) => one.filter(words));
  };
  const each = (call) => [shown.all, shown.rest].filter(Boolean).forEach(call);
  return { update: () => each((one) => one.update()), redraw: () => each((one) => one.redraw()), close: () => each((one) => one.close()) };
}

function runPicker(runs, run, others) {
  const chosen = new Set(others.map((one) => one.run_id));
  const rest = runs.filter((one) => one.run_id !== run.run_id);
  if (!rest.length) return null;
  const change = (id, on) => {
    if (on) chosen.add(id);
    else chosen.delete(id);
    location.hash = hashOf({ view: "curves", run: run.run_id, over: [...chosen].slice(0, MOST_RUNS - 1).join(",") });
  };
  return h("fieldset", { class: "modes" }, h("legend", {}, `Draw over ${visible(run.name)}`), rest.slice(0, 12).map((one) => h("label", {}, h("input", { type: "checkbox", checked: chosen.has(one.run_id), onchange: (event) => change(one.run_id, event.target.checked) }), ` ${visible(one.name)} `, h("span", { class: "note" }, one.run_id))));
}
