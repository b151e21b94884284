"""A run directory keeps settings and results of the run; a second attempt adds to it and overwrites nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from example_trainer.launcher.run_dir import DirectoryUnusable, RunDirectoryInUse, plan_run_dir
from example_trainer.launcher.summary import NoRun, Summary, as_table, draw, rolling_mean, summarise
from example_trainer.launcher.totals import processor_use, record_launch


def write_run(root: Path, rewards: list[float]) -> None:
    rows = [
        {
            "step": step,
            "reward/mean": reward,
            "response/length_mean": 13.0 + step,
            "time/step": 0.3,
            "timestamp": 100.0 + step,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, accuracy in ((0, 0.08), (len(rewards), 0.97)):
        folder = root / f"evals/step-{step}"
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps({"results": {"all": {"eval/accuracy": accuracy}}}))


def shown(summary: Summary) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(as_table(summary))
    return capture.get()


def test_each_attempt_has_logs_of_its_own(tmp_path: Path) -> None:
    for attempt in (1, 2):
        run = plan_run_dir(tmp_path, name="demo", log_dir=None, resume=False)
        run.create()
        assert run.logs == tmp_path / f"logs/attempt_{attempt}"
        assert (tmp_path / "logs/latest").resolve() == run.logs.resolve()


def test_a_copied_run_whose_latest_logs_became_a_directory_says_what_to_remove(tmp_path: Path) -> None:
    (tmp_path / "logs" / "latest").mkdir(parents=True)
    run = plan_run_dir(tmp_path, name="demo", log_dir=None, resume=True)
    with pytest.raises(DirectoryUnusable, match=r"logs/latest is a directory and no link, .*; remove it"):
        run.create()
    (tmp_path / "logs" / "latest").rmdir()
    assert run.create().attempt == 1


def test_log_dir_is_taken_exactly_where_it_is_given(tmp_path: Path) -> None:
    """R20: if unset it is inside the run directory, if set it is exactly that path."""
    run = plan_run_dir(tmp_path / "run", name="demo", log_dir=tmp_path / "elsewhere", resume=False)
    run.create()
    assert (tmp_path / "elsewhere/latest").exists()


def test_a_directory_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1])
    with pytest.raises(RunDirectoryInUse, match="--resume"):
        plan_run_dir(tmp_path, name="demo", log_dir=None, resume=False)
    plan_run_dir(tmp_path, name="demo", log_dir=None, resume=True)


def test_the_record_names_versions_and_revision(tmp_path: Path) -> None:
    run = plan_run_dir(tmp_path, name="demo", log_dir=None, resume=False)
    run.create()
    run.write_record({"trainer": {"lr": 1e-4}})
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["trainer"] == {"lr": 1e-4}
    assert "pydantic" in record["versions"]
    assert "git" in record


def test_the_record_leaves_out_what_names_itself_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared secrets are removed earlier, by plan and command line; this last step does not rely on that."""
    monkeypatch.setattr(sys, "argv", ["atropos-grpo-run", "--vllm.api-key", "s3cret"])
    run = plan_run_dir(tmp_path, name="demo", log_dir=None, resume=False)
    run.create()
    run.write_record({"programs": {"vllm": {"settings": {"api_key": "s3cret", "url": "http://h/t/s3cret/"}}}})
    assert "s3cret" not in (tmp_path / "config.json").read_text()


def test_a_half_written_record_or_evaluation_hinders_neither_resume_nor_summary(tmp_path: Path) -> None:
    write_run(tmp_path, [0.1, 0.2])
    (tmp_path / "config.json").write_text('{"wandb_run_id": "a1b')
    (tmp_path / "evals/step-2/metrics.json").write_text('{"resu')
    run = plan_run_dir(tmp_path, name="demo", log_dir=None, resume=True)
    assert run.wandb_run_id(resumes=True)
    assert summarise(tmp_path).accuracy_base == 0.08


def test_the_summary_tells_before_and_after(tmp_path: Path) -> None:
    write_run(tmp_path, [0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.95, 0.96, 0.96])
    timeline = {"start": 90.0, "broker": 91.0, "imports": 96.0, "vllm": 99.0, "trainer": 99.5, "end": 115.0}
    summary = summarise(tmp_path, timeline=timeline)
    assert (summary.accuracy_base, summary.accuracy_trained) == (0.08, 0.97)
    assert summary.reward_first == pytest.approx(0.62)
    assert summary.reward_last == pytest.approx(0.944)
    assert summary.good_reward_step == 7
    assert summary.first_step_after_seconds == pytest.approx(11.0)
    assert summary.good_reward_after_seconds == pytest.approx(17.0)
    assert summary.split_seconds == {"imports": 6.0, "engine": 3.0, "first batch": 1.7, "steps": 9.3, "end": 5.0}


def test_times_are_those_of_the_last_launch_whose_steps_come_after_a_resume(tmp_path: Path) -> None:
    write_run(tmp_path, [0.25, 0.5, 0.9, 0.95, 0.95, 0.95])
    summary = summarise(tmp_path, timeline={"start": 104.5, "end": 110.0})
    assert summary.first_step_after_seconds == pytest.approx(0.5)
    assert summary.split_seconds == {"first batch": 0.2, "steps": 1.3, "end": 4.0}
    assert (summary.good_reward_step, summary.steps) == (5, 6)


def test_the_table_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    text = shown(summarise(tmp_path))
    assert "reward, first and last 5 steps" in text
    assert "accuracy" not in text


def test_a_directory_without_steps_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match=r"no metrics\.jsonl"):
        summarise(tmp_path)


@pytest.mark.parametrize(
    "rows",
    [
        ['{"step": 1, "reward/mean": 0.5, "response/length_mean": 3}'],
        ['{"step": 1}', '{"step": 2}'],
        ['{"step": 1, "reward/mean": -3.0}', '{"step": 2}', '{"step": 3, "reward/mean": 40.0}'],
    ],
    ids=["one step", "no finite reward", "rewards beyond 0 and 1, and one that is not finite"],
)
def test_the_picture_shows_every_reward_that_there_is(rows: list[str], tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert draw(tmp_path).read_bytes().startswith(b"\x89PNG")
    axes = next(axes for axes in plt.gcf().axes if axes.get_ylabel() == "reward")
    rewards = [reward for row in rows if (reward := json.loads(row).get("reward/mean")) is not None]
    low, high = axes.get_ylim()
    assert all(low <= reward <= high for reward in rewards)
    assert list(axes.lines[0].get_ydata()) == rewards
    assert len(axes.lines[1].get_ydata()) == len(rewards), "a missing reward does not hide the mean of the others"
    missing = len(rows) - len(rewards)
    assert axes.get_title() == (f"no finite reward in {missing} of {len(rows)} steps" if missing else "")


def test_each_environment_has_its_own_evaluations_in_the_summary_and_the_picture(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    _write_accuracies(tmp_path / "evals", {"environment-1": (0.2, 0.4), "environment-2": (0.6, 1.0)})
    summary = summarise(tmp_path)
    assert (summary.accuracy_base, summary.accuracy_trained) == (0.4, 0.7)
    draw(tmp_path)
    labels = [line.get_label() for axes in plt.gcf().axes for line in axes.lines]
    assert {"accuracy, environment-1", "accuracy, environment-2"} <= set(labels)


def test_an_environment_that_was_evaluated_once_does_not_make_the_others_seem_worse(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    _write_accuracies(tmp_path / "evals", {"environment-1": (0.2, 0.4), "environment-2": (0.9,)})
    summary = summarise(tmp_path)
    assert (summary.accuracy_base, summary.accuracy_trained) == (0.2, 0.4)


def _write_accuracies(evals: Path, by_environment: dict[str, tuple[float, ...]]) -> None:
    for environment, values in by_environment.items():
        for step, accuracy in enumerate(values):
            folder = evals / environment / f"step-{step}"
            folder.mkdir(parents=True)
            (folder / "metrics.json").write_text(json.dumps({"eval/accuracy": accuracy}))


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"eval/length_mean": 9.0, "eval/reward": 0.25}, "eval/reward, held-out data"),
        ({"eval/judged": 0.25, "eval/length_mean": 9.0}, "eval/judged, held-out data"),
        ({"eval/reward": 9.0, "eval/accuracy": 0.25}, "accuracy, held-out problems"),
    ],
)
def test_evaluations_without_an_accuracy_are_told_by_their_reward_or_their_first_metric(
    metrics: dict[str, float], told: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for step, better in ((0, 0.0), (9, 0.5), (10, 0.25)):
        folder = tmp_path / f"evals/step-{step}"
        folder.mkdir(parents=True)
        content = {"results": {"all": {name: value + better for name, value in metrics.items()}}}
        (folder / "metrics.json").write_text(json.dumps(content))
    (line,) = [line for line in shown(summarise(tmp_path)).splitlines() if "held-out" in line]
    assert told in line
    assert "0.250 -> 0.500" in line


def test_the_rolling_mean_starts_with_what_there_is() -> None:
    assert rolling_mean([1.0, 2.0, 3.0], window=2) == [1.0, 1.5, 2.5]


def test_the_table_names_the_signs_of_trouble_with_their_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert "signs of trouble" not in shown(summarise(tmp_path))
    (tmp_path / "events.jsonl").write_text('{"event": "health", "sign": "kl", "step": 7}\n{"event": "health"}\n')
    assert summarise(tmp_path).signs == ("kl (step 7)",)
    assert "kl (step 7)" in shown(summarise(tmp_path))


def test_of_a_sign_of_many_steps_the_table_has_their_number_the_first_and_the_last(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    signs = [{"sign": "kl", "step": step} for step in range(7, 5007, 2)]
    signs += [{"sign": "loss", "step": step} for step in (8, 60)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(sign) + "\n" for sign in signs))
    assert summarise(tmp_path).signs == ("kl (2,500 steps from 7 to 5005)", "loss (steps 8, 60)")


@pytest.mark.parametrize(("share", "told"), [(0.94, True), (0.5, False)])
def test_the_table_tells_the_share_without_a_learning_signal_where_it_is_most(
    share: float, told: bool, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data/no_signal_fraction": share}) + "\n")
    summary = summarise(tmp_path)
    assert summary.no_signal_fraction == share
    lines = [line for line in shown(summary).splitlines() if "without a learning signal" in line]
    assert [f"{share:.0%}" in line for line in lines] == [True] * told


def write_token_rows(root: Path) -> None:
    rows = [
        {
            "step": step,
            "timestamp": 100.0 * step,
            "time/step": 50.0,
            "data/sequences": 8.0,
            "response/length_mean": 12.5,
            "data/trained_tokens": trained,
            "perf/forward_tokens": forward,
            "perf/padded_fraction": padded,
            "perf/zero_gradient_fraction": idle,
        }
        for step, trained, forward, padded, idle in ((1, 100.0, 100.0, 0.1, 1.0), (2, 300.0, 300.0, 0.5, 0.2))
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_totals_are_sums_over_the_run_and_shares_of_all_its_tokens(tmp_path: Path) -> None:
    write_token_rows(tmp_path)
    totals = summarise(tmp_path).totals
    assert (totals.generated_tokens, totals.trained_tokens, totals.forward_tokens) == (200, 400, 400)
    assert totals.padded_fraction == pytest.approx((0.1 * 100 + 0.5 * 300) / 400)
    assert totals.zero_gradient_fraction == pytest.approx((100 + 0.2 * 300) / 400)
    assert (totals.seconds, totals.cpu_seconds, totals.cost) == (100.0, None, None)


def test_a_launch_costs_from_its_command_to_its_end_and_the_steps_of_launches_before_are_added(tmp_path: Path) -> None:
    write_token_rows(tmp_path)
    timeline = {"start": 150.0, "end": 280.0, "cpu_seconds": 90.0, "gpus": 2.0}
    totals = summarise(tmp_path, timeline=timeline, cost_per_hour=20.0).totals
    assert totals.seconds == 50.0 + 130.0
    assert totals.cost == pytest.approx(20.0 * 180 / 3600)
    assert (totals.cpu_seconds, totals.gpu_seconds) == (90.0, 260.0)


def test_hours_and_cost_are_those_of_all_launches_also_of_one_that_was_stopped(tmp_path: Path) -> None:
    write_token_rows(tmp_path)
    record_launch(tmp_path, {"start": 70.0, "end": 120.0, "cpu_seconds": 40.0, "gpus": 1.0})
    timeline = {"start": 150.0, "vllm": 160.0, "end": 280.0, "cpu_seconds": 90.0, "gpus": 2.0}
    totals = summarise(tmp_path, timeline=timeline, cost_per_hour=20.0).totals
    assert totals.seconds == 50.0 + 130.0
    assert totals.cost == pytest.approx(20.0 * 180 / 3600)
    assert (totals.cpu_seconds, totals.gpu_seconds) == (130.0, 50.0 + 260.0)
    record_launch(tmp_path, timeline)
    assert summarise(tmp_path, timeline=timeline, cost_per_hour=20.0).totals == totals, "a launch counts once"
    assert summarise(tmp_path, cost_per_hour=20.0).totals == totals


def test_the_steps_of_a_launch_that_was_killed_without_a_record_are_added(tmp_path: Path) -> None:
    write_token_rows(tmp_path)
    record_launch(tmp_path, {"start": 150.0, "end": 280.0})
    assert summarise(tmp_path).totals.seconds == 50.0 + 130.0


def test_the_totals_and_the_cost_are_in_the_table_and_in_the_file(tmp_path: Path) -> None:
    write_token_rows(tmp_path)
    summary = summarise(tmp_path, cost_per_hour=36.0)
    summary.write(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["totals"]["cost"] == 1.0
    text = shown(summary)
    assert "200, 400, 400" in text
    assert "40.0%" in text
    assert "1.00" in text
    assert "GPU" not in text


def test_the_cpu_time_of_programs_that_have_ended_is_counted_and_so_are_the_gpus_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = processor_use(tmp_path)
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert processor_use(tmp_path)["cpu_seconds"] >= before["cpu_seconds"] + 0.5
    assert before["gpus"] == 3.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert processor_use(tmp_path)["gpus"] == 2.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processor_use(tmp_path)["gpus"] == 0.0
