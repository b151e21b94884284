"""The trajectory broker: environments push scored groups, trainers pull exact batches.

Read `config` for what an operator may set, `server` for one process, `routes` for each path, `http` for what handlers
share, `broker` for the rules, `store` for what survives a crash; `wire` is the contract as types, `client` calls it.
`testing` runs a real broker for other packages' tests, `view` one over the store of a run that has ended.
`pyproject.toml` declares the layers, top to bottom.
"""
