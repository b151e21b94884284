"""The trainer, its inference server and the launcher.

The trainer from the top layer down: `cli`, `trainers` (the loop), `step`, `training`, then `weights` (one file per sync
mode), `objective`, `data` and `distributed`, then `model` and `modeling`, then `config`, `memory` and `options`. The
launcher is `run` with `launcher`, the inference server `vllm_api_server` with `serving`. All three use
`weight_protocol`, `processes`, `monitoring` and `api`. `pyproject.toml` defines the layers.
"""
