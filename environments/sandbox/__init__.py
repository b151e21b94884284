"""The sandbox that a model's Python runs in: isolation, limits, and the tool that environments offer to models.

`python_tool` is what environments use. It starts `supervisor`, a process of its own, which starts each run
(`launch`), isolated by `isolation` (bubblewrap, else namespaces of our own), under the filter of `system_calls` and
in `control_groups`, which limit a whole run; `runner` is the program inside. Apart from `python_tool` nothing here
imports anything else of the project but the broker's `common.control_groups`, so that the supervisor starts fast and
holds no secrets.
"""
