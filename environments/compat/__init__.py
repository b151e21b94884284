"""Runs environments that were written for Atropos, unmodified and without `atroposlib`.

In reading order: `runner` (runs a file, with Atropos' module names led to ours), `envs`, `servers`, `rewards` and
`utils` (what stands behind those names). It may import `sdk` and its folders, `rewards` and the broker's `common`.
"""
