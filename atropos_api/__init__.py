"""The trajectory broker: environments push scored groups, trainers pull exact batches.

Read `config` for what an operator may set, `server` for one process, `routes` for each path, `http` for what
handlers share, `broker` for the rules, `store` for what survives a crash; `wire` is the contract as types, `client`
calls it. `testing` is a real broker for other people's tests. The layers, top to bottom, stand in `pyproject.toml`.
"""
