"""A small trainer that publishes once and is killed, by SIGKILL, at a given point.

One process imports everything and attaches; each publish is made by a fork of it, so that a kill costs no start. It
reads `VERSION MASTERS POINT` lines from standard input, and prints the fork's process id, then how it ended.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from example_trainer.weights import logprob_parity
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import config_of

LEASE_SECONDS = 0.5
"""Lease of a publish that will not be ended; other publishes have a long one, for busy machines."""


def variant(base, version):
    """Return the weights of a version, clearly different from those of every other."""
    noise = torch.Generator().manual_seed(version)
    return {name: base[name] * (1 + 0.2 * torch.randn(base[name].shape, generator=noise)) for name in sorted(base)}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(owner, name):
    """Kill this process right after the call of this method."""
    call = getattr(owner, name)
    setattr(owner, name, lambda *arguments: (call(*arguments), die()))


class DeadlyHalfWay(dict):
    """A mapping that kills this process when half of its items have been read."""

    def __getitem__(self, name):
        if list(self).index(name) >= len(self) // 2:
            die()
        return super().__getitem__(name)


def set_masters(policy, weights):
    with torch.no_grad(), policy.changing():
        for name, master in policy.masters.items():
            master.data.copy_(weights[name])


def publish(bridge, policy, version, weights, point):
    header = bridge._attached.header
    if point != "none":
        bridge._lease_seconds = LEASE_SECONDS
    if point == "begun":
        die_after(bridge, "_begin")
    elif point == "header stamped":
        die_after(header, "begin_write")
    elif point == "half written" and policy.steps_served:
        weights = DeadlyHalfWay(weights)
    elif point == "half written":
        policy.served = DeadlyHalfWay(policy.served)
    elif point == "written":
        header.end_write = lambda _: die()
    elif point == "header whole":
        die_after(header, "end_write")
    elif point == "ended":
        bridge._verify = lambda *_: die()
    set_masters(policy, weights)
    bridge.publish(version)


def main(model, url, manifest):
    torch.set_num_threads(1)
    logprob_parity._PROMPT_LENGTHS, logprob_parity._OUTPUTS_PER_PROMPT = (4, 33), 2
    bridges = {}
    for masters in ("fp32", "none"):
        settings = {"dtype": "float32", "master_weights": masters, "vllm_config_path": manifest, "drain_seconds": 0.05}
        bridges[masters] = SharedVllmBridge(config_of(url, model, **settings))
        policy = bridges[masters].prepare()
    base = {name: tensor.clone() for name, tensor in policy.checkpoint_tensors().items()}
    tell("ready")
    for line in sys.stdin:
        version, masters, point = line.strip().split(" ", 2)
        child = os.fork()
        if child == 0:
            bridge = bridges[masters]
            publish(bridge, bridge._policy, int(version), variant(base, int(version)), point)
            os._exit(0)
        tell(child)
        _, status = os.waitpid(child, 0)
        tell(os.waitstatus_to_exitcode(status))


def tell(something):
    sys.stdout.write(f"{something}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
