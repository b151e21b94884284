"""Each path of the broker: a file for each contract, with every route's description next to its handler.

In reading order: `v1`, `servers` (the registry of inference servers), `fleets` (how many of them are wanted), `v0` (the
Atropos contract), `watch` (curves and rollouts for people), `page` (the live page), `ops` (health, status, events),
`metrics`, `schema` (the parts of descriptions), `docs` (the OpenAPI document made of them). It may import `http` and
all below.
"""
