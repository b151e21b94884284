"""`--slurm`: the inference servers of a Slurm job, on the nodes behind those that train.

`SLURM_JOB_NODELIST` names the nodes, the first `NUM_TRAINING_NODES` of them train, and each of the others runs as many
servers as fit its eight GPUs with `INFER_TP` of them each, on the ports from 9000 on.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from atropos_api.common.cliconfig import ConfigError
from environments.sdk.config import APIServerConfig

GPUS_A_NODE = 8
FIRST_PORT = 9000


def slurm_servers(template: APIServerConfig, variables: Mapping[str, str] = os.environ) -> list[APIServerConfig]:
    """A config for each server of the job, like `template` but for the address."""
    listed = variables.get("SLURM_JOB_NODELIST")
    if not listed:
        raise ConfigError("--slurm: SLURM_JOB_NODELIST is not set; start inside a Slurm job, or name --openai.base_url")
    training = _whole_number(variables, "NUM_TRAINING_NODES", default=0, least=0)
    gpus_a_server = _whole_number(variables, "INFER_TP", default=1, least=1)
    nodes = _hostnames(listed)[training:]
    if not nodes or gpus_a_server > GPUS_A_NODE:
        raise ConfigError(
            f"--slurm: no server fits: {len(nodes)} nodes are left behind NUM_TRAINING_NODES={training}, "
            f"and INFER_TP={gpus_a_server} of {GPUS_A_NODE} GPUs"
        )
    return [
        template.model_copy(update={"base_url": f"http://{node}:{FIRST_PORT + number}/v1"})
        for node in nodes
        for number in range(GPUS_A_NODE // gpus_a_server)
    ]


def _hostnames(listed: str) -> list[str]:
    command = ["scontrol", "show", "hostnames", listed]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--slurm: {' '.join(command)} failed ({error}); it must be on the PATH") from error
    return done.stdout.split()


def _whole_number(variables: Mapping[str, str], name: str, *, default: int, least: int) -> int:
    text = variables.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"--slurm: {name}={text!r} must be a whole number of at least {least}")
    return int(text)
