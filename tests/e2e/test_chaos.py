"""`make chaos`: the real programs are killed again and again under the real launcher, and nothing is lost or doubled.

A live run ends with all its steps and code 0, without help. A run over recorded groups ends with exactly the weights
of an undisturbed run: the test logs the hash of both. ATROPOS_CHAOS_KILLS and ATROPOS_CHAOS_MODES ask for more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_api.store.factory import open_store

from .conftest import Launched
from .killed_run import DEMO, FLAGS, MODES, RESTARTING, Chaos, Run, check_history
from .recorded_server import RECORDED_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(14_400)]

logger = logging.getLogger(__name__)

ASKED_KILLS = int(os.environ.get("ATROPOS_CHAOS_KILLS", "0"))
ASKED_MODES = os.environ.get("ATROPOS_CHAOS_MODES", "shared_vllm")
LIVE_KILLS, RECORDED_KILLS = ASKED_KILLS or 12, ASKED_KILLS or 8
STEPS_A_KILL = 6
"""A run has this many steps for each kill, so that it does not end before the last one."""
END_SECONDS = 900.0
GROUPS_A_STEP, GROUP_SIZE = 16, 8
MOST_DIFFERENCE = 1e-3
"""A version off by one differs by 1e-2; a policy trained for long is sharp, and rounds more than 1e-4."""


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_parts_are_killed_at_random_ends_with_all_its_steps_and_leaves_nothing(
    start_launcher: Callable[..., Launched], mode: str
) -> None:
    if ASKED_MODES != "all" and mode not in ASKED_MODES.split(","):
        pytest.skip(f"takes minutes; ATROPOS_CHAOS_MODES={mode} or =all runs it")
    kills = LIVE_KILLS if mode == "shared_vllm" else min(LIVE_KILLS, 50)
    steps = STEPS_A_KILL * kills
    flags = ("--training-steps", str(steps), "--api.keep_batches", str(steps))
    run = Run(mode, start_launcher(*DEMO, *FLAGS, *flags, *MODES[mode]))
    chaos = Chaos(seed=kills, mean_pause_seconds=9.0 if mode in RESTARTING else 3.0)
    chaos.strike(run, kills)
    code, out, error = run.launched.end(END_SECONDS)
    assert code == 0, error + run.launched.logs()
    logger.info("%s: killed %s", mode, dict(chaos.killed))
    assert sum(chaos.killed.values()) == kills, "the run ended before the last kill; raise STEPS_A_KILL"
    check_history(run, steps, most=MOST_DIFFERENCE)
    check_groups(run.directory / "broker", steps)
    assert run.left() == []
    assert "restart" in out


def check_groups(store: Path, steps: int) -> None:
    """Each batch has the groups of one step, and no submission is in the store more often than it was sent."""
    ledger, _ = open_store(str(store))
    snapshot = ledger.load()
    batches = [group.batch for group in snapshot.groups if group.batch]
    assert {number: batches.count(number) for number in set(batches)} == dict.fromkeys(
        range(1, steps + 1), GROUPS_A_STEP
    )
    sent = {key.key_id: key.group_count for key in snapshot.keys}
    stored = [group.key_id for group in snapshot.groups if group.key_id in sent]
    assert all(stored.count(key_id) <= count for key_id, count in sent.items())
    ledger.close()


def test_a_killed_run_over_recorded_groups_ends_with_the_very_weights_of_the_quiet_one(
    start_launcher: Callable[..., Launched], tmp_path: Path
) -> None:
    steps = STEPS_A_KILL * RECORDED_KILLS
    recorded = tmp_path / "recorded.jsonl"
    record(recorded, groups=steps * GROUPS_A_STEP)
    flags = ("--training-steps", str(steps), "--env", str(Path(__file__).with_name("recorded_server.py")))

    def launch(name: str) -> Launched:
        command = (*DEMO, *FLAGS, *flags)
        return start_launcher(*command, run_dir=tmp_path / name, **{RECORDED_VARIABLE: str(recorded)})

    quiet = launch("quiet")
    code, _, error = quiet.end(END_SECONDS)
    assert code == 0, error + quiet.logs()
    killed = Run("shared_vllm", launch("killed"))
    chaos = Chaos(seed=RECORDED_KILLS)
    chaos.strike(killed, RECORDED_KILLS)
    code, _, error = killed.launched.end(END_SECONDS)
    assert code == 0, error + killed.launched.logs()
    hashes = [hash_of(path / f"checkpoint-{steps}") for path in (quiet.run_dir, killed.directory)]
    logger.info("weights after %d steps: quiet %s, after %s %s", steps, hashes[0], dict(chaos.killed), hashes[1])
    assert sum(chaos.killed.values()) == RECORDED_KILLS, "the run ended before the last kill; raise STEPS_A_KILL"
    assert hashes[0] == hashes[1]
    assert killed.left() == []


def record(path: Path, *, groups: int) -> None:
    """Write random groups of the demo's model: prompts of 12 tokens, answers of 4 to 20, logprobs as if sampled."""
    chance = random.Random(groups)
    path.write_text("".join(json.dumps(random_group(chance)) + "\n" for _ in range(groups)))


def random_group(chance: random.Random) -> dict[str, Any]:
    prompt = [chance.randrange(5, 40) for _ in range(12)]
    answers = [[chance.randrange(5, 40) for _ in range(chance.randrange(4, 21))] for _ in range(GROUP_SIZE)]
    return {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": [chance.choice((0.0, 1.0)) for _ in answers],
        "inference_logprobs": [[1.0] * len(prompt) + [-chance.uniform(0.1, 4.0) for _ in answer] for answer in answers],
    }


def hash_of(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()[:16]
