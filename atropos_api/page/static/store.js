// The state that views share, and the address: which view is open and what it shows is in the part of the address
// after `#`, so that each rollout and each token has a link.

/** Values by name, with listeners that are called after a change. */
export class Store {
  constructor() {
    this.values = {};
    this.listeners = new Map();
  }

  get(name) {
    return this.values[name];
  }

  set(name, value) {
    this.values[name] = value;
    for (const listener of this.listeners.get(name) || []) listener(value);
  }

  /** Call `listener` after each change of a value until `signal` is aborted. */
  on(name, listener, signal) {
    if (!this.listeners.has(name)) this.listeners.set(name, new Set());
    this.listeners.get(name).add(listener);
    if (signal) signal.addEventListener("abort", () => this.listeners.get(name).delete(listener));
  }
}

/** Return what an address says: {view, run, batch, group, sample, token, ...}. */
export function parseHash(hash) {
  const values = Object.fromEntries(new URLSearchParams(hash.replace(/^#\/?/, "")));
  if (!values.view) values.view = values.group !== undefined ? "group" : values.batch !== undefined ? "rollouts" : "overview";
  return values;
}

/** Return the address of a view; a value that is null is left out. The slash tells it from a place in the document. */
export function hashOf(values) {
  const named = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `#/${new URLSearchParams(named)}`;
}

/** Return the run to show: the one in the address, or the newest if it names none; null if the broker has no such run. */
export function runOf(store, route) {
  const runs = store.get("runs") || [];
  return (route.run ? runs.find((run) => run.run_id === route.run) : runs[0]) || null;
}
