// Curves of runs, read once and then only what is new: a run of 100,000 steps is a thousand points of each metric.

const POINTS = 1000;
const MOST_NAMES = 100; // of one call
const EMPTY = { steps: [], values: [] };

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
    if (fresh.length) await this.ask(known, runId, fresh, null);
    // By the steps that were read, not those with a value: a metric that no step reports is read no further back.
    if (old.length) await this.ask(known, runId, old, Math.min(...old.map((name) => known.get(name).read + 1)));
    return Object.fromEntries(names.map((name) => [name, known.get(name)]));
  }

  /** Forget a run, whose steps may be trained again after a resume; without an id, every run. */
  forget(runId) {
    if (runId === undefined) this.runs.clear();
    else this.runs.delete(runId);
  }

  /** Read metrics from step `first` on, or whole if it is null. */
  async ask(known, runId, names, first) {
    for (let at = 0; at < names.length; at += MOST_NAMES) {
      const some = names.slice(at, at + MOST_NAMES);
      const found = await this.source.get(`v1/runs/${encodeURIComponent(runId)}/series`, { name: some, points: POINTS, first });
      for (const name of some) known.set(name, { ...joined(first === null ? EMPTY : known.get(name), found.series[name] || EMPTY), read: found.last_step ?? -1 });
    }
  }
}

/** A line with the steps of another that come after its own. */
function joined(before, line) {
  const last = before.steps.at(-1) ?? -1;
  const from = line.steps.findIndex((step) => step > last);
  if (from < 0) return before;
  return { steps: before.steps.concat(line.steps.slice(from)), values: before.values.concat(line.values.slice(from)) };
}
