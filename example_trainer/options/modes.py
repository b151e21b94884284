"""The weight sync modes: a row describes each mode, and all other code reads that row.

A further mode is a row here and a bridge in `weights/`, which `weights/factory.py` names, there also for
`--registered-servers`; two help texts name all modes, in `publish.py` and `launcher/run_file.py`. `shared_vllm` with
`--num-inference-nodes` is the broadcast of `weights/broadcast.py`: the same mode, with servers that share no memory.
This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

BridgeMode = Literal["none", "shared_vllm", "lora_only", "lora_restart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way for trained weights to reach the inference server."""

    name: BridgeMode
    why_servers_fixed: str
    """The reason why the number of servers cannot change without `--registered-servers`, and what to start instead."""
    trains_adapter: bool = False
    """True if an adapter is trained next to a frozen base; else the weights themselves are."""
    shares_memory: bool = False
    """True if the trainer writes into the memory that vLLM reads; not if servers are addressed by broadcast."""
    server_outlives_publish: bool = False
    """True if one server takes every publish, at each step if asked; else a publish replaces or reloads the server."""
    refuses_adapter_settings: bool = False
    """True if settings of adapters are refused because the mode does not train any."""
    interval_if_set: bool = False
    """True if a given `--vllm-restart-interval` has an effect, although the server could take each step's weights."""
    awaits_policy: bool = False
    """True if the launcher's server answers only once a policy has been published to it."""
    starts_missing_server: bool = False
    """True if the trainer starts a server only if none answers."""
    drains_requests: bool = True
    """True if a publish waits for running requests; else they go on with the version that they began with."""
    reloads_checkpoints: bool = False
    """True if a running server can read the written weights instead of being replaced."""


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            Mode(
                name="shared_vllm",
                why_servers_fixed="servers that come and go take weights by broadcast: start the run with "
                "--registered-servers",
                shares_memory=True,
                server_outlives_publish=True,
            ),
            Mode(
                name="lora_only",
                why_servers_fixed="trainer and environments were given the servers' addresses: start the run with "
                "--registered-servers",
                trains_adapter=True,
                server_outlives_publish=True,
                interval_if_set=True,
                awaits_policy=True,
                starts_missing_server=True,
                drains_requests=False,
            ),
            Mode(
                name="lora_restart",
                why_servers_fixed="mode lora_restart replaces its one server: start the run with --weight-bridge-mode "
                "lora_only --registered-servers",
                trains_adapter=True,
            ),
            Mode(
                name="none",
                why_servers_fixed="mode none replaces its one server: start the run with --registered-servers "
                "--restart-method reload",
                refuses_adapter_settings=True,
                reloads_checkpoints=True,
            ),
        )
    }
)
