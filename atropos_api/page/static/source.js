// The documents that the page reads from the broker. Every address is relative, so that a path prefix or a token before
// the path stays in place.

const ANSWER_MS = 10000; // without a limit, a broker that hangs would count as connected

export class NotAvailable extends Error {}

/** The documents below the address of the page. */
export class Source {
  constructor(base = document.baseURI) {
    this.base = new URL(".", base);
    this.tag = null;
  }

  url(path, parameters = {}) {
    const url = new URL(path, this.base);
    for (const [name, value] of Object.entries(parameters)) {
      for (const one of [value].flat()) {
        if (one !== null && one !== undefined && one !== "") url.searchParams.append(name, one);
      }
    }
    return url;
  }

  async get(path, parameters = {}) {
    const response = await fetch(this.url(path, parameters), { headers: { Accept: "application/json" } });
    if (!response.ok) throw new NotAvailable(await detailOf(response));
    return response.json();
  }

  /** Return the status, or null if nothing has happened since the last call. */
  async poll() {
    const headers = { Accept: "application/json" };
    if (this.tag) headers["If-None-Match"] = this.tag;
    const response = await fetch(this.url("v1/status"), { headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (response.status === 304) return null;
    if (!response.ok) throw new NotAvailable(await detailOf(response));
    this.tag = response.headers.get("ETag");
    return response.json();
  }
}

async function detailOf(response) {
  try {
    const problem = await response.json();
    return problem.detail || `the broker answers ${response.status}`;
  } catch {
    return `the broker answers ${response.status}`;
  }
}
