"""Runs environments that were written for Atropos, unmodified and without `atroposlib`.

In reading order: `runner` (runs a file; imports of Atropos' modules get ours), `envs`, `servers`, `rewards` and
`utils` (the contents of those modules). It may import `sdk` and its folders, `rewards`, and the
broker's `wire` and `common`.
"""
