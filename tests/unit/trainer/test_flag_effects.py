"""Each flag of the trainer has its documented effect on a run's results, not only on what is parsed."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.errors import AtroposError
from example_trainer import training
from example_trainer.commands.generate_docs import metric_sections
from example_trainer.config import TrainingConfig
from example_trainer.errors import BatchTimeout
from example_trainer.modeling.logprobs import token_logprobs
from example_trainer.options.presets import PRESETS
from example_trainer.testing import make_tiny_model
from example_trainer.vllm_manager import VllmManager
from example_trainer.weights import served_model
from example_trainer.weights.factory import make_bridge
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.restart import RestartBridge

from .flag_effects import EFFECTS, SERVED
from .flag_harness import FlagHarness, wandb_file
from .flags_elsewhere import ELSEWHERE

ROOT = Path(__file__).parents[3]
ELSEWHERE_LOGGED = ("eval/", "sft/", "perf/gpu_memory")
"""Metrics that come from environments, or need a GPU."""
EVERY_TERM = (
    "--training-steps 2 --kl-coef 1 --entropy-coef 1 --distill forward_kl --old-logprobs recomputed "
    "--mismatch-correction token_truncate --off-policy-mask 0 --staleness-decay 0.5 --dtype float16"
)


@pytest.fixture(scope="module")
def flag_harness(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> FlagHarness:
    other = make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    return FlagHarness(tiny_model, other, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("flag", EFFECTS)
def test_a_flag_does_what_it_says(flag_harness: FlagHarness, flag: str) -> None:
    effect = EFFECTS[flag]
    if effect.needs:
        pytest.importorskip(effect.needs)
    usual = flag_harness.run(*effect.beside.split())
    seen = flag_harness.run(*effect.beside.split(), *effect.argv.split())
    assert effect.holds(seen, usual)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains(flag_harness: FlagHarness, name: str) -> None:
    seen = flag_harness.run("--preset", name)
    assert seen.code == 0
    assert seen.moved_from(flag_harness.start) > 0


def test_every_metric_that_a_run_logs_is_declared_and_the_other_way_round(flag_harness: FlagHarness) -> None:
    flag_harness.run(*EVERY_TERM.split())
    flag_harness.run("--loss-type", "m2po")
    patterns = [
        re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(name)))
        for section in metric_sections().values()
        for name, _ in section
        if not name.startswith(ELSEWHERE_LOGGED)
    ]
    logged = {name for run in flag_harness.runs for row in run.rows for name in row} - {"timestamp"}
    seen = {name for name in logged if not name.startswith(ELSEWHERE_LOGGED)}
    assert {name for name in seen if not any(pattern.fullmatch(name) for pattern in patterns)} == set()
    assert [pattern.pattern for pattern in patterns if not any(map(pattern.fullmatch, seen))] == []


@pytest.mark.parametrize("flag", SERVED)
def test_a_flag_of_the_server_is_in_the_command_that_starts_it(flag: str, tmp_path: Path) -> None:
    argv, wanted = SERVED[flag]
    assert wanted in started_with(tmp_path, *argv.split())
    assert wanted not in started_with(tmp_path)


def test_every_flag_has_an_entry_and_none_has_two() -> None:
    listed = [*EFFECTS, *SERVED, *ELSEWHERE]
    assert set(TrainingConfig.model_fields) - set(listed) == set(), "add what it does to flag_effects.py"
    assert sorted(listed) == sorted(set(listed) & set(TrainingConfig.model_fields))


def test_a_resumed_run_goes_on_after_its_newest_checkpoint(flag_harness: FlagHarness) -> None:
    first = flag_harness.run("--checkpoint-interval", "1", "--name", "begun")
    here = ("--run-dir", str(first.directory), "--training-steps", "2")
    again = flag_harness.run(*here, "--resume", "auto")
    assert (again.request.resume, again.request.resume_from_batch) == (True, 1)
    assert [row["step"] for row in first.rows] == [1, 2]


def test_an_optimizer_of_the_users_own_trains_and_its_state_goes_on_after_a_resume(
    flag_harness: FlagHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steppers.py").write_text(
        "import torch\ndef momentum(groups, settings):\n"
        "    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.betas[0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ("--optimizer", "steppers:momentum", "--adam-beta1", "0.5", "--lr", "0.1")
    whole = flag_harness.run(*own, "--training-steps", "2")
    halved = flag_harness.run(*own, "--checkpoint-interval", "1")
    assert not halved.same_weights(flag_harness.run("--lr", "0.1"))
    resumed = flag_harness.run(*own, "--run-dir", str(halved.directory), "--training-steps", "2", "--resume", "auto")
    assert resumed.code == 0
    assert halved.same_weights(whole), "without the momentum of the first step the second would be another"


def test_the_token_in_a_file_is_shown_to_the_broker(flag_harness: FlagHarness, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("in-a-file-1\n")
    assert flag_harness.run("--atropos-token-file", str(path)).recorded.token == "Bearer in-a-file-1"


def test_nothing_that_a_run_leaves_behind_holds_its_tokens(
    flag_harness: FlagHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = ("--atropos-token", "s3cret-of-the-broker", "--bridge-token", "s3cret-of-the-server")
    monkeypatch.setattr(sys, "argv", ["atropos-grpo", *tokens])  # which W&B records
    seen = flag_harness.run(*tokens, "--use-wandb", "--save-batches", "--benchmark")
    assert b"--bridge-token" in wandb_file(seen)
    left = [path for path in seen.directory.rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl", "trainer_state.json"} <= {path.name for path in left}
    assert any(path.suffix == ".wandb" for path in left)
    assert [path for path in left if b"s3cret" in path.read_bytes()] == []
    assert "s3cret" not in seen.log
    assert (seen.directory / "config.json").stat().st_mode & 0o777 == 0o600


def test_wandb_without_a_login_is_found_before_the_run_begins_at_the_broker(
    flag_harness: FlagHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_login(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", no_login)
    with pytest.raises(AtroposError, match=r"--use-wandb: W&B did not start a run \(No API key configured\)"):
        flag_harness.run("--use-wandb")
    assert [name for name, _ in flag_harness.recorded.calls] == ["wait"]


def test_a_batch_that_nobody_fills_is_given_up_after_the_timeout(flag_harness: FlagHarness) -> None:
    with pytest.raises(BatchTimeout, match=r"batch 3 within 0 s.*--batch-timeout"):
        flag_harness.run("--training-steps", "3", "--batch-timeout", "0.3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_clear_line(flag_harness: FlagHarness) -> None:
    with pytest.raises(AtroposError, match="--device cuda:0: this machine has no GPU"):
        flag_harness.run("--device", "cuda:0")


def test_kernels_that_no_compiler_can_make_are_one_clear_line(
    flag_harness: FlagHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(AtroposError, match=r"^--kernels compile: there is no g\+\+ .*; use --kernels eager$"):
        flag_harness.run("--kernels", "compile")


def test_the_head_works_on_as_many_tokens_at_a_time_as_it_is_told(
    flag_harness: FlagHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def head(*args: Any, chunk_tokens: int, **more: Any) -> Any:
        asked.append(chunk_tokens)
        return token_logprobs(*args, chunk_tokens=chunk_tokens, **more)

    monkeypatch.setattr(training, "token_logprobs", head)
    flag_harness.run("--logprob-chunk-tokens", "5")
    assert set(asked) == {5}


def test_with_inference_on_other_hosts_no_server_is_started_here(tmp_path: Path) -> None:
    usual = ["--model-name", "m", "--run-dir", str(tmp_path), "--weight-bridge-mode", "lora_only"]
    for nodes, starts in (("0", True), ("1", False)):
        config = load_config(TrainingConfig, [*usual, "--num-inference-nodes", nodes], prog="p", description="d")
        bridge = make_bridge(config)
        assert (getattr(bridge, "_vllm", None) is not None) == starts
    with pytest.raises(ConfigError, match="--num-inference-nodes 2: mode lora_restart restarts its servers"):
        load_config(
            TrainingConfig,
            ["--model-name", "m", "--weight-bridge-mode", "lora_restart", "--num-inference-nodes", "2"],
            prog="p",
            description="d",
        )


@pytest.mark.parametrize(("visible", "seen"), [(None, "3"), ("4,5,6,GPU-5a3e", "GPU-5a3e")])
def test_the_server_sees_the_gpu_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config(
        TrainingConfig, ["--model-name", "m", "--run-dir", str(tmp_path), "--vllm-gpu", "3"], prog="p", description="d"
    )
    bridge = make_bridge(config)
    assert isinstance(bridge, RestartBridge)
    told = "import os; print('GPU', os.environ['CUDA_VISIBLE_DEVICES'])"
    options = replace(bridge._vllm, program=(sys.executable, "-c", told), port=0)
    manager = VllmManager(options)
    manager.start("weights", version=1)
    deadline = time.monotonic() + 20
    while "GPU" not in options.log_path.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    manager.close()
    assert options.log_path.read_text().strip() == f"GPU {seen}"


def test_the_server_of_a_trainer_on_the_same_gpu_gets_its_cache_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "cache_on_shared_gpu", lambda _config, **_: 5 << 30)
    for mode in ("none", "lora_only"):
        argv = ["--model-name", "m", "--run-dir", str(tmp_path), "--weight-bridge-mode", mode]
        bridge = make_bridge(load_config(TrainingConfig, argv, prog="p", description="d"))
        assert isinstance(bridge, RestartBridge | LoraOnlyBridge)
        assert bridge._vllm is not None
        assert "--kv-cache-memory-bytes 5368709120" in " ".join(VllmManager(bridge._vllm).command("w", version=1))


def started_with(directory: Path, *argv: str) -> str:
    """Return the command line of the server that mode `none` starts."""
    usual = ["--model-name", "m", "--run-dir", str(directory)]
    config = load_config(TrainingConfig, [*usual, *argv], prog="p", description="d")
    bridge = make_bridge(config)
    assert isinstance(bridge, RestartBridge)
    return " ".join(VllmManager(bridge._vllm).command("weights", version=1))
