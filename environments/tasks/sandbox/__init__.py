"""The sandbox that a model's Python runs in: what it sees (`view`), by what it is kept in, and how its limits are held.

`runner` is what runs inside. `bubblewrap` and `namespaces` are the two ways of keeping it in, `system_calls` the filter
that both use. `cgroups` and `process_tree` hold the limits that a whole run has. `supervisor` puts them together in a
process of its own, started by `client` for `environments.tasks.python_tool`. Nothing here imports anything else of the
project, so that the supervisor starts fast and holds nothing worth stealing.
"""
