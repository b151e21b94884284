"""Trainer and environments of a launch write one W&B run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import wandb

from atropos_api.common import wandb_run
from environments.sdk.reporting import WandbTracker as EnvironmentTracker
from example_trainer.launcher.endpoints import settle_endpoints
from example_trainer.launcher.plan import Plan, make_plan
from example_trainer.launcher.run_dir import plan_run_dir
from example_trainer.launcher.run_file import read_settings
from example_trainer.monitoring.trackers import WandbTracker

RUN = ("--env", "gsm8k_server.py", "--wandb-project", "p")


@pytest.fixture(autouse=True)
def no_variables_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def plan(tmp_path: Path, *argv: str) -> Plan:
    settings = read_settings(["--model-name", "some/model", "--run-dir", str(tmp_path / "run"), *argv])
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=None, resume=True)
    return make_plan(settings, run, settle_endpoints(settings), model="some/model")


def variables_of(made: Plan, program: str) -> dict[str, str]:
    child = made.child(program)
    assert child is not None
    return {name: value for name, value in child.environment.items() if name.startswith("WANDB_")}


def test_the_trainer_begins_the_run_and_the_environment_joins_it(tmp_path: Path) -> None:
    made = plan(tmp_path, *RUN)
    trainer, environment = variables_of(made, "trainer"), variables_of(made, "environment")
    assert trainer["WANDB_RUN_ID"] == environment["WANDB_RUN_ID"] == made.wandb_run_id
    assert trainer["WANDB_MODE"] == environment["WANDB_MODE"] == "shared"
    assert environment["WANDB_PROJECT"] == "p"
    assert (trainer["WANDB__PRIMARY"], environment["WANDB__PRIMARY"]) == ("true", "false")
    assert environment["WANDB__UPDATE_FINISH_STATE"] == "false", "an environment that ends first does not end the run"
    assert plan(tmp_path, *RUN).wandb_run_id != made.wandb_run_id


def test_a_resumed_launch_continues_its_run_and_a_given_id_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps({"wandb_run_id": "earlier"}))
    assert plan(tmp_path, *RUN, "--resume", "auto").wandb_run_id == "earlier"
    assert plan(tmp_path, *RUN).wandb_run_id != "earlier"
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert plan(tmp_path, *RUN).wandb_run_id == "mine"


def test_without_wandb_or_its_shared_mode_each_program_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert variables_of(plan(tmp_path, "--env", "gsm8k_server.py"), "trainer") == {}
    assert variables_of(plan(tmp_path, *RUN, "--no-use-wandb"), "trainer") == {}
    monkeypatch.setattr(wandb_run.metadata, "version", lambda _: "0.18.7")
    made = plan(tmp_path, *RUN)
    assert (variables_of(made, "trainer"), variables_of(made, "environment"), made.wandb_run_id) == ({}, {}, None)


class SharedRun:
    """A stand-in for a run in shared mode, which needs W&B's server; a step number, ignored there, is an error here."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, metrics: dict[str, Any]) -> None:
        self.logged.append(metrics)


def test_in_a_run_of_several_programs_the_step_is_a_metric_and_the_axis_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SharedRun()
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **given: begun.append(given) or run)
    monkeypatch.setenv("WANDB__PRIMARY", "true")
    WandbTracker(project="p", group=None, name="tried", directory=tmp_path, config={}).log(3, {"reward/mean": 0.5})
    monkeypatch.setenv("WANDB__PRIMARY", "false")
    EnvironmentTracker(name="own-name", project="q", group=None, config={}).log({"eval/accuracy": 0.25}, 3)
    assert run.logged == [{"reward/mean": 0.5, "step": 3}, {"eval/accuracy": 0.25, "step": 3}]
    assert run.axes == {"*": "step"}
    assert (begun[0]["name"], begun[1]) == ("tried", {}), "the run keeps the trainer's name and settings"


def test_an_evaluation_that_ends_steps_after_its_own_is_not_logged_to_a_step_that_wandb_would_drop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OwnRun:
        def log(self, metrics: dict[str, Any], *, step: int) -> None:
            logged.append((step, metrics))

    logged: list[tuple[int, dict[str, Any]]] = []
    monkeypatch.delenv("WANDB__PRIMARY", raising=False)
    monkeypatch.setattr(wandb, "init", lambda **_: OwnRun())
    tracker = EnvironmentTracker(name="alone", project=None, group=None, config={})
    for metrics, step in (({"train/items": 1}, 5), ({"train/items": 2}, 7), ({"eval/accuracy": 0.5}, 5)):
        tracker.log(metrics, step)
    assert logged == [(5, {"train/items": 1}), (7, {"train/items": 2}), (7, {"eval/accuracy": 0.5, "step": 5})]


def test_offline_both_write_files_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run").mkdir()
    made = plan(tmp_path, *RUN)
    for program in ("trainer", "environment"):
        wandb.teardown()  # it reads the environment once a process
        with monkeypatch.context() as patched:
            for name, value in variables_of(made, program).items():
                patched.setenv(name, value)
            if program == "trainer":
                tracker = WandbTracker(project="p", group=None, name="n", directory=tmp_path / "run", config={})
                tracker.log(1, {"reward/mean": 0.25})
                tracker.close()
            else:
                environment = EnvironmentTracker(name="own-name", project=None, group=None, config={})
                environment.log({"eval/accuracy": 0.5}, 1)
                environment.finish()
            wandb.teardown()
    written = sorted((tmp_path / "run").glob(f"**/offline-run-*/run-{made.wandb_run_id}.wandb"))
    assert len(written) == 2, "they have directories of their own, also if both begin in one second"
    content = b"".join(path.read_bytes() for path in written)
    assert b"reward/mean" in content
    assert b"eval/accuracy" in content
    assert b"own-name" not in content


@pytest.mark.parametrize(
    ("flags", "logs"),
    [
        (("--wandb-project", "p"), True),
        (("--wandb-project", "p", "--no-use-wandb"), False),
        (("--wandb-run-name", "n"), False),
        ((), False),
    ],
)
def test_naming_a_project_logs_to_it(flags: tuple[str, ...], logs: bool) -> None:
    assert read_settings(["--model-name", "m", *flags]).trainer.use_wandb is logs
