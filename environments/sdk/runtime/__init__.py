"""The runtime serves one environment: the command line, the rollouts, and the connection to the broker.

In reading order: `cli` (verbs and flags), `worker` (`serve`), `commands` (`process`, `evaluate`, `validate`),
`rollouts` (one item from collection to delivery), `broker_session`, `stopping` (signals). It knows an environment
as `sdk.environment` describes it, and may import all of `sdk` below that.
"""
