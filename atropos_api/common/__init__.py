"""The code that all three packages share; it imports nothing else of the project.

In reading order: `errors` (the root of them), `cliconfig` and `option_flags` (command lines from models), `logs`,
`secrets` (tokens and redaction), `files` (written whole or not at all), `identity` (names, addresses, versions),
`metric_names`, `wandb_run` (one run for several programs), `concurrency` (wake-ups and blocking work), `malloc`.
"""
