"""The runtime serves one environment: the command line, the rollouts, and the connection to the broker.

In reading order: `cli` (verbs and flags), `worker` (`serve`), `commands` (`process`, `evaluate`, `validate`),
`rollouts` (one item from collection on) with `delivery` (of its groups) and `items` (leases of their numbers),
`broker_session`, `activity` (for the page), `metrics` (for Prometheus), `stopping` (signals). It knows an environment
as `sdk.environment` describes it, and may import all of `sdk` below that.
"""
