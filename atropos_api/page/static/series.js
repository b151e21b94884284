// Curves of runs, read once and then only what is new: a run of 100,000 steps is a thousand points of each metric.

const POINTS = 1000;
const MOST_NAMES = 100; // of one call

export class SeriesCache {
  constructor(source) {
    this.source = source;
    this.runs = new Map();
  }

  /** Return the lines of these metrics of a run, {steps, values} by name; read what is missing or new. */
  async read(runId, names) {
    if (!this.runs.has(runId)) this.runs.set(runId, new Map());
    const known = this.runs.get(runId);
    const fresh = names.filter((name) => !known.has(name) || known.get(name).steps.length > 2 * POINTS);
    const old = names.filter((name) => !fresh.includes(name));
    if (fresh.length) this.take(known, await this.ask(runId, fresh, null), true);
    if (old.length) {
      const from = Math.min(...old.map((name) => (known.get(name).steps.at(-1) ?? 0) + 1));
      this.take(known, await this.ask(runId, old, from), false);
    }
    for (const name of names) if (!known.has(name)) known.set(name, { steps: [], values: [] });
    return Object.fromEntries(names.map((name) => [name, known.get(name)]));
  }

  /** Forget a run, whose steps may be trained again after a resume. */
  forget(runId) {
    this.runs.delete(runId);
  }

  async ask(runId, names, first) {
    const found = {};
    for (let at = 0; at < names.length; at += MOST_NAMES) {
      const some = { name: names.slice(at, at + MOST_NAMES), points: POINTS, first };
      Object.assign(found, (await this.source.get(`v1/runs/${encodeURIComponent(runId)}/series`, some)).series);
    }
    return found;
  }

  take(known, series, whole) {
    for (const [name, line] of Object.entries(series)) {
      const before = known.get(name);
      if (whole || !before) {
        known.set(name, line);
        continue;
      }
      const last = before.steps.at(-1) ?? -1;
      const from = line.steps.findIndex((step) => step > last);
      if (from < 0) continue;
      known.set(name, { steps: before.steps.concat(line.steps.slice(from)), values: before.values.concat(line.values.slice(from)) });
    }
  }
}
