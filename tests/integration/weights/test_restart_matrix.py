"""No torn or stale token with weights from files: `none` by restart and by reading in place, and `lora_restart`.

Publishes under each kind of load, and the check of every token by the version stamped on it. A restart takes about ten
seconds, and no token can cross one, so these cells have a tenth of the publishes. Each takes minutes, so they run with
`ATROPOS_PUBLISHES=100` only; `tests/integration/serving` has the cells of the other modes.
"""

from __future__ import annotations

import logging
import os
import time

import pytest
import torch

from .rollout_load import RolloutLoad, differences

PUBLISHES = int(os.environ.get("ATROPOS_PUBLISHES", "0"))
ADAPTER = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
MODES = {
    "none by restart": {},
    "none by reload": {"restart_method": "reload"},
    "lora_restart": {"weight_bridge_mode": "lora_restart", **ADAPTER},
}
LOADS = {
    "idle": {"workers": 2},
    "decoding": {"workers": 64, "output_tokens": 100},
    "long shared prompts": {"workers": 12, "shared_prompt": list(range(2, 282))},
}
MAX_ERROR, MEAN_ERROR = 1e-4, 5e-6
VERSION_GAP, DIFFERING_SHARE = 1e-2, 0.9

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(PUBLISHES == 0, reason="minutes each; ATROPOS_PUBLISHES=100 runs them"),
]

logger = logging.getLogger(__name__)


@pytest.fixture
def randomise(tiny_qwen2):
    """A function that gives a policy the masters of a number, clearly different from all others."""
    bases: dict[int, dict[str, torch.Tensor]] = {}

    def change(policy, number):
        base = bases.setdefault(id(policy), policy.snapshot())
        noise = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, master in policy.masters.items():
                random = torch.randn(master.shape, generator=noise)
                if policy.has_adapter:
                    master.copy_(random * (0.1 if "lora_A" in name else 0.05))
                else:
                    master.copy_(base[name] * (1 + 0.2 * random))

    return change


def await_answers(load):
    """Wait for answers to half of the workers."""
    count, deadline = len(load.samples) + load.workers // 2 + 1, time.monotonic() + 300
    while len(load.samples) < count:
        assert time.monotonic() < deadline, load.errors[:1]
        time.sleep(0.05)


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("mode", MODES)
def test_r5_under_any_load_each_token_is_of_the_version_stamped_on_it(bridge_for, randomise, mode, kind):
    bridge = bridge_for(**MODES[mode])
    policy = bridge.prepare()
    weights = {}

    def publish(version):
        randomise(policy, version)
        bridge.publish(version)
        weights[version] = policy.snapshot()

    publish(1)
    publishes = PUBLISHES if mode == "none by reload" else max(1, PUBLISHES // 10)
    versions = range(2, publishes + 2)
    load = RolloutLoad(bridge._manager.url, **LOADS[kind])
    if kind == "idle":
        for version in versions:
            publish(version)
            with load:
                await_answers(load)
    else:
        with load:
            for version in versions:
                await_answers(load)
                publish(version)
            await_answers(load)
    assert load.errors == []
    assert len(load.samples) == load.asked
    judge(f"{mode}, {kind}", policy, weights, load)


def judge(cell, policy, weights, load):
    found = differences(policy, weights, load)
    apart = (differences(policy, weights, load, back=1) >= VERSION_GAP).float().mean()
    logger.info(
        "%s: %d publishes, %d tokens, max %.1e, %.3f differ", cell, len(weights) - 1, len(found), found.max(), apart
    )
    assert len(load.versions()) >= len(weights) - 1
    assert found.max() <= MAX_ERROR
    assert found.mean() <= MEAN_ERROR
    assert apart >= DIFFERING_SHARE
