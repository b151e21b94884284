"""`make chaos`: the real programs are killed again and again under the real launcher, and nothing is lost or doubled.

A live run ends with all its steps, the reward of an undisturbed one and code 0, without help. A run over recorded
groups ends with exactly the weights of an undisturbed run: the test logs the hash of both. ATROPOS_CHAOS_KILLS and
ATROPOS_CHAOS_MODES ask for more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Launched
from .killed_run import (
    DEMO,
    FLAGS,
    GROUPS_A_STEP,
    MODES,
    MOST_DIFFERENCE,
    RESTARTING,
    Chaos,
    Run,
    check_groups,
    check_history,
    check_reward,
    hash_of,
    record,
)
from .recorded_server import RECORDED_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(14_400)]

logger = logging.getLogger(__name__)

ASKED_KILLS = int(os.environ.get("ATROPOS_CHAOS_KILLS", "0"))
ASKED_MODES = os.environ.get("ATROPOS_CHAOS_MODES", "shared_vllm")
LIVE_KILLS, RECORDED_KILLS = ASKED_KILLS or 12, ASKED_KILLS or 8
LIVE_STEPS_A_KILL, RECORDED_STEPS_A_KILL = 4, 6
"""A run has this many steps for each kill, so that it does not end before the last one."""
END_SECONDS = 1800.0
"""Far more than any of the runs needs; with 50 kills and adapters one took more than 900 s on two slow cores."""


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_parts_are_killed_at_random_ends_with_all_its_steps_and_leaves_nothing(
    start_launcher: Callable[..., Launched], mode: str
) -> None:
    if ASKED_MODES != "all" and mode not in ASKED_MODES.split(","):
        pytest.skip(f"takes minutes; ATROPOS_CHAOS_MODES={mode} or =all runs it")
    kills = LIVE_KILLS if mode == "shared_vllm" else min(LIVE_KILLS, 50)
    steps = LIVE_STEPS_A_KILL * kills
    flags = ("--training-steps", str(steps), "--api.keep_batches", str(steps))
    run = Run(mode, start_launcher(*DEMO, *FLAGS, *flags, *MODES[mode]))
    chaos = Chaos(seed=kills, mean_pause_seconds=9.0 if mode in RESTARTING else 3.0)
    chaos.strike(run, kills)
    code, out, error = run.launched.end(END_SECONDS)
    assert code == 0, error + run.launched.logs()
    logger.info("%s: killed %s", mode, dict(chaos.killed))
    assert sum(chaos.killed.values()) == kills, "it ended before the last kill; raise LIVE_STEPS_A_KILL"
    check_history(run, steps, most=MOST_DIFFERENCE)
    check_reward(run)
    check_groups(run.directory / "broker", steps)
    assert run.left() == []
    assert "restart" in out


def test_a_killed_run_over_recorded_groups_ends_with_the_very_weights_of_the_quiet_one(
    start_launcher: Callable[..., Launched], tmp_path: Path
) -> None:
    steps = RECORDED_STEPS_A_KILL * RECORDED_KILLS
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
    assert sum(chaos.killed.values()) == RECORDED_KILLS, "it ended before the last kill; raise RECORDED_STEPS_A_KILL"
    assert hashes[0] == hashes[1]
    assert killed.left() == []
