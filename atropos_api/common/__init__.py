"""The code that all three packages share; it imports nothing else of the project.

In reading order: `errors` (the root of them), `cliconfig` and `option_flags` (command lines from models), `yaml_files`,
`streams` (standard streams that may be closed), `logs`, `secrets` (tokens and redaction), `cross_site` (requests that
foreign web pages cause), `head_requests` (answered as GETs), `http_upgrades` (offers that are ignored), `files`
(written whole or not at all), `identity` (names, addresses, versions), `import_path` (a user's own modules),
`sampling_values` (what leaves a distribution whole), `metric_names`, `trackio_run`, `wandb_run` (one run for several
programs), `observability` (its options), `prometheus`, `tracing` over `otel`, `html_pages` (pages that are one file),
`concurrency` (wake-ups and blocking work), `malloc`, `control_groups` (the kernel's).
"""
