"""The stores of the broker: a ledger of small rows and a log of bodies; in memory, in a directory, or in Redis.

In reading order: `base` (the protocols), `memory`, `sqlite_ledger`, `segments` with `disk` (what it keeps
and refuses), `directory` (both in one place: the default store), `backup` (ledger and segments as a tar),
`redis_session` and `redis_ledger`, `factory` (from a name to a store), `failpoints` (crashes on demand, for tests). It
may import `wire`, `errors` and `common`.
"""
