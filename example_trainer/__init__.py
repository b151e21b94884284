"""The trainer, its inference server and the launcher.

The trainer from the top: `cli`, `trainers` (the loop), `step`, `training`, then `weights` (one file a sync mode),
`objective`, `data` and `distributed`, then `model` and `modeling`, then `config` and `options`. Two towers stand
beside it: `run` with `launcher`, and `vllm_api_server` with `serving`. `weight_protocol`, `processes`, `monitoring`
and `api` lie under all three. The layers stand in `pyproject.toml`.
"""
