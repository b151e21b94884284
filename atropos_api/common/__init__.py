"""The code that all three packages share; it imports nothing else of the project.

In reading order: `errors` (the root of them), `cliconfig` with `option_flags` (command lines from models) and
`streams` (the standard ones), `logs`, `secrets` (tokens and redaction), `cross_site` (requests that foreign web pages
cause), `files` (written whole or not at all), `identity` (names, addresses, versions), `import_path` (a user's own
modules), `metric_names`, `wandb_run` (one run for several programs), `observability` (its options), `prometheus`,
`tracing` over `otel`, `concurrency` (wake-ups and blocking work), `malloc`.
"""
