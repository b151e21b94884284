"""A run that does not fit its GPU is refused in one line before anything is loaded, or changed by `--fit auto`."""

from __future__ import annotations

import json
import logging
import os
import resource
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer import cli
from example_trainer import run as launcher
from example_trainer.config import TrainingConfig
from example_trainer.errors import DoesNotFit
from example_trainer.launcher.endpoints import fit_to_gpu
from example_trainer.launcher.run_file import read_settings
from example_trainer.memory import preflight as module
from example_trainer.memory.preflight import cache_on_shared_gpu, gpu_bytes, gpu_of, preflight, serves_on, trainer_gpu
from example_trainer.memory.shapes import REFERENCE_SHAPES
from example_trainer.processes.gpus import gpu_memory_bytes

ROOT = Path(__file__).parents[3]
HERMES = "NousResearch/Hermes-3-Llama-3.1-8B"
PUBLISHED = {
    "launcher": f'-m example_trainer.run --model-name {HERMES} --atropos-url "http://localhost:8002" '
    "--training-steps 30",
    "trainer": f"-m example_trainer.grpo --model-name {HERMES} --weight-bridge-mode shared_vllm --vllm-port 9001 "
    "--vllm-config-path /tmp/grpo_training/vllm_bridge_config.json --atropos-url http://localhost:8002 "
    "--warmup-steps 20 --clip-eps 0.2",
}
"""The published guide's commands for an 8B model, which according to it fit 80 GB."""

EIGHT_BILLION = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SHARED: dict[str, Any] = {"weight_bridge_mode": "shared_vllm"}


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """A directory with the configuration of an 8B model, and no weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(EIGHT_BILLION))
    return directory


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A Hugging Face cache in which the model's config.json is, as a download leaves it."""
    model = tmp_path / "hub" / f"models--{HERMES.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(EIGHT_BILLION))
    return tmp_path / "hub"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_memory_bytes", lambda _gpu: None)


def config_of(model: Path, **flags: Any) -> TrainingConfig:
    return TrainingConfig(model_name=str(model), **flags)


@pytest.mark.parametrize("program", PUBLISHED)
def test_a_run_that_does_not_fit_is_refused_in_one_line_with_the_flags_that_fit(
    program: str, hub_cache: Path, tmp_path: Path
) -> None:
    command = [sys.executable, *shlex.split(PUBLISHED[program]), "--gpu-memory-gb", "80"]
    environment = os.environ | {"HF_HUB_CACHE": str(hub_cache), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert f"{HERMES} needs 1" in line
    assert "on a GPU of 80.0 GB (vLLM's share" in line
    assert "; --master-weights none --gradient-checkpointing fits (" in line
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0
    assert not (tmp_path / "runs").exists()


def test_with_the_flags_that_the_line_names_the_run_is_planned(
    large_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--model-name", str(large_model), "--gpu-memory-gb", "80", "--dry-run"]
    with pytest.raises(DoesNotFit):
        launcher.run(run)
    assert launcher.run([*run, "--master-weights", "none", "--gradient-checkpointing"]) == 0
    assert "example_trainer.vllm_api_server" in capsys.readouterr().out


def test_fit_auto_sets_the_flags_and_says_which(large_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--model-name", str(large_model), "--gpu-memory-gb", "80", "--fit", "auto", "--dry-run"]
    assert launcher.run(run) == 0
    shown = capsys.readouterr()
    assert "master_weights: none" in shown.out
    assert "gradient_checkpointing: true" in shown.out
    assert shown.err.startswith("atropos-grpo-run: --fit auto chose --master-weights none --gradient-checkpointing (77")
    assert cli.run([*run, "--weight-bridge-mode", "lora_restart", "--lora-r", "8", "--gpu-memory-gb", "60"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert (settings["gradient_checkpointing"], settings["master_weights"]) == (True, "fp32")


def test_fit_auto_gives_the_servers_share_to_the_server(large_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--model-name", str(large_model), "--gpu-memory-gb", "80", "--fit", "auto", "--dry-run"]
    assert launcher.run([*run, "--gpu-memory-utilization", "0.6"]) == 0
    shown = capsys.readouterr()
    assert "gpu_memory_utilization: 0.45" in shown.out
    assert "--gpu-memory-utilization 0.45" in shown.err


def test_what_was_chosen_is_logged_by_the_trainer(
    large_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_train", lambda _config, _logs: 0)
    monkeypatch.setattr(cli, "setup_logging", lambda _name, **_: None)
    run = ["--model-name", str(large_model), *shlex.split("--weight-bridge-mode lora_restart --fit auto")]
    with caplog.at_level(logging.INFO):
        assert cli.run([*run, "--gpu-memory-gb", "60"]) == 0
        assert cli.run([*run, "--gpu-memory-gb", "200"]) == 0
    said = [record.getMessage() for record in caplog.records if "--fit auto" in record.getMessage()]
    assert said[0].startswith("--fit auto chose --gradient-checkpointing (")
    assert said[1].startswith("--fit auto chose no flag, since it fits as it is (")


def test_fit_off_checks_nothing(large_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--model-name", str(large_model), "--gpu-memory-gb", "8", "--dry-run"]
    for program in (launcher.run, cli.run):
        with pytest.raises(DoesNotFit):
            program(run)
        assert program([*run, "--fit", "off"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_or_without_the_models_shape_nothing_is_said(large_model: Path) -> None:
    assert preflight(config_of(large_model), starts_server=True).changes == {}
    for model in ("nobody/nothing-here", "tiny/chain", "tiny/chain:1"):
        config = TrainingConfig(model_name=model, gpu_memory_gb=1.0, fit="auto")
        assert preflight(config, starts_server=True).sentence is None


def test_the_gpus_own_memory_counts_unless_another_is_named(large_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 80e9, 1: 400e9}
    monkeypatch.setattr(module, "gpu_memory_bytes", sizes.get)
    with pytest.raises(DoesNotFit, match=r"on a GPU of 80\.0 GB"):
        preflight(config_of(large_model), starts_server=True)
    preflight(config_of(large_model, device="cuda:1"), starts_server=True)
    preflight(config_of(large_model, device="cpu"), starts_server=True)
    assert gpu_bytes(config_of(large_model, gpu_memory_gb=80), 1) == 80e9


def test_the_trainers_gpu_is_that_of_its_device_or_of_its_local_rank(large_model: Path) -> None:
    assert trainer_gpu(config_of(large_model, device="cuda:3")) == 3
    ranks = config_of(large_model, world_size=4, trainer_rank=2, optimizer="adamw")
    assert trainer_gpu(ranks) == 0, "all ranks choose as the first, which vLLM may share"


@pytest.mark.parametrize(
    ("flags", "starts_server", "share"),
    [
        ({"weight_bridge_mode": "none"}, True, 0.45),
        ({"weight_bridge_mode": "none", "vllm_gpu": 1}, True, 0.0),
        ({"weight_bridge_mode": "none", "device": "cuda:1"}, True, 0.0),
        (SHARED, False, 0.21),  # the weights and one sequence
        ({**SHARED, "gpu_memory_utilization": 0.3}, False, 0.3),
        ({"weight_bridge_mode": "lora_only"}, False, 0.0),
        ({"weight_bridge_mode": "lora_only", "gpu_memory_utilization": 0.3}, False, 0.3),
        ({"weight_bridge_mode": "lora_only", "vllm_host": "10.0.0.2", "gpu_memory_utilization": 0.3}, False, 0.0),
    ],
)
def test_the_servers_share_counts_if_it_is_on_this_gpu_and_known(
    large_model: Path, flags: dict[str, Any], starts_server: bool, share: float
) -> None:
    config = config_of(large_model, **flags)
    here = serves_on(trainer_gpu(config), config, {})
    found = gpu_of(REFERENCE_SHAPES["8B"], config, 80e9, shares_gpu=here, starts_server=starts_server)
    assert (round(found.share, 2), found.share_can_change) == (share, starts_server)


def test_the_context_length_of_a_server_started_elsewhere_decides_if_its_share_is_not_named(large_model: Path) -> None:
    lone: dict[str, Any] = {**SHARED, "master_weights": "none", "gradient_checkpointing": True, "gpu_memory_gb": 70}
    preflight(config_of(large_model, **lone), starts_server=False)
    with pytest.raises(DoesNotFit, match=r"vLLM's share 33\.\d"):
        preflight(config_of(large_model, **lone, max_model_len=131072), starts_server=False)
    named = config_of(large_model, **lone, max_model_len=131072, gpu_memory_utilization=0.3)
    assert preflight(named, starts_server=False).changes == {}


def test_the_gpus_of_server_and_trainer_are_numbered_among_those_that_are_visible(large_model: Path) -> None:
    config = config_of(large_model, weight_bridge_mode="none", vllm_gpu=1)
    for visible in ("4,5", "1,0", "GPU-5a3e,MIG-77b0"):
        assert serves_on(1, config, {"CUDA_VISIBLE_DEVICES": visible})
        assert not serves_on(0, config, {"CUDA_VISIBLE_DEVICES": visible})
    assert serves_on(1, config, {})
    with pytest.raises(ConfigError, match="--vllm-gpu 1: CUDA_VISIBLE_DEVICES=4 leaves 1 GPU, numbered from 0"):
        serves_on(0, config, {"CUDA_VISIBLE_DEVICES": "4"})


def test_every_gpu_of_every_server_counts(large_model: Path) -> None:
    def on(**flags: Any) -> list[int]:
        config = config_of(large_model, **flags)
        return [gpu for gpu in range(6) if serves_on(gpu, config, {})]

    assert on(weight_bridge_mode="none", vllm_gpu=1, vllm_tensor_parallel_size=2) == [1, 2]
    assert on(weight_bridge_mode="none", vllm_tensor_parallel_size=2) == [0, 1]
    two = {**SHARED, "num_inference_nodes": 2, "vllm_gpu": 1}
    assert on(**two) == [1, 2]
    assert on(**two, vllm_tensor_parallel_size=2) == [1, 2, 3, 4]


@pytest.fixture
def serving_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GB on which vLLM would serve."""
    monkeypatch.setattr(module, "gpu_memory_bytes", lambda _gpu: 80e9)
    monkeypatch.setattr(module, "serves_from_gpu", lambda _environment: True)


@pytest.mark.usefixtures("serving_gpu")
@pytest.mark.parametrize(
    ("flags", "share", "beside_server", "gigabytes"),
    [
        ({"weight_bridge_mode": "none"}, 0.45, False, 17.8),  # 36.0 without 16.1 of weights and 2.1 to work in
        ({"weight_bridge_mode": "none", "vllm_gpu": 1}, 0.45, False, None),  # vLLM measures what no other process takes
        ({"weight_bridge_mode": "none", "device": "cpu"}, 0.45, False, None),
        ({**SHARED, "num_inference_nodes": 2, "device": "cuda:1"}, 0.225, True, None),  # weights and one sequence alone
        ({**SHARED, "num_inference_nodes": 2, "vllm_tensor_parallel_size": 2}, 0.225, True, 7.8),
        ({"weight_bridge_mode": "none"}, 1.0, False, 57.8),  # all but the memory of driver and process
    ],
)
def test_the_cache_of_a_server_beside_other_processes_is_what_its_share_leaves(
    large_model: Path, flags: dict[str, Any], share: float, beside_server: bool, gigabytes: float | None
) -> None:
    """VLLM takes off its cache whatever another process allocates while it starts."""
    found = cache_on_shared_gpu(
        config_of(large_model, **flags), share=share, beside_server=beside_server, environment={}
    )
    assert (None if found is None else round(found / 1e9, 1)) == gigabytes


def test_without_a_gpu_no_cache_is_computed(large_model: Path, no_gpu: None) -> None:
    config = config_of(large_model, weight_bridge_mode="none")
    assert cache_on_shared_gpu(config, share=0.45, beside_server=True, environment={}) is None


def test_what_the_launcher_chose_is_left_as_it_is_by_the_trainer(large_model: Path) -> None:
    run = ["--model-name", str(large_model), "--gpu-memory-gb", "80", "--fit", "auto"]
    for more in ([], ["--weight-bridge-mode", "lora_restart", "--gpu-memory-gb", "48"], ["--batch-size", "64"]):
        launched, _ = fit_to_gpu(read_settings([*run, *more]))
        asked = launched.trainer
        starts_server = not asked.mode.server_outlives_publish
        assert preflight(asked, starts_server=starts_server).changes == {}


def test_a_share_in_the_servers_section_counts_and_is_not_changed(large_model: Path) -> None:
    run = ["--model-name", str(large_model), "--gpu-memory-gb", "80", "--master-weights", "none"]
    run += ["--gradient-checkpointing", "--fit", "auto"]
    usual, _ = fit_to_gpu(read_settings([*run, "--gpu-memory-utilization", "0.7"]))
    assert usual.trainer.gpu_memory_utilization == 0.45
    named, sentence = fit_to_gpu(read_settings([*run, "--vllm.gpu-memory-utilization", "0.7"]))
    assert named.trainer.gpu_memory_utilization == 0.45, "the trainer's own, which the section overrides"
    assert (named.trainer.master_weights, "--master-weights host" in (sentence or "")) == ("host", True)


def driver(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program named nvidia-smi first on the path; it lists six GPUs, 0 and 5 of 81,559 and 1,000 MiB."""
    program = directory / "nvidia-smi"
    listed = "\n".join(f"GPU {number}: NVIDIA H100 (UUID: GPU-{number})" for number in range(6))
    figures = "GPU-0) echo 81559;; GPU-5) echo 1000;; *) exit 6;;"
    program.write_text(f'#!/bin/sh\nfor last; do :; done\ncase "$last" in -L) echo "{listed}";; {figures} esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_the_driver_is_asked_for_the_gpu_that_this_process_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_memory_bytes(0) == 81559 * 2**20
    assert gpu_memory_bytes(3) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5")
    assert gpu_memory_bytes(1) == 1000 * 2**20
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpu_memory_bytes(0) is None


TEACHER = ["--env", "distill_server.py", "--distill", "forward_kl", "--teacher.model_name", "some/teacher"]
ON_100_GB = "--master-weights none --gradient-checkpointing --gpu-memory-gb 100"


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--teacher.vllm.gpu_memory_utilization 0.4", "vLLM's share 45.0, the teacher's share 40.0"),
        ("--teacher.gpu 0", "vLLM's share 45.0, the teacher's share 45.0"),
        ("--teacher.gpu 0,1 --vllm-gpu 1 --weight-bridge-mode none", "(the teacher's share 45.0, weights"),
        ("--vllm.gpu-memory-utilization 0.4", "(vLLM's share 40.0, the teacher's share 22.5, "),
        ("--gpu-memory-utilization 0.3", "--gpu-memory-utilization 0.3, of which the policy's part is 0.15, on a GPU"),
        ("", None),
        ("--teacher.gpu 1", None),
        ("--gpu-memory-utilization 0.3 --teacher.gpu 1", None),
        ("--vllm-gpu 1", None),
        ("--teacher.vllm.gpu_memory_utilization 0.05", None),
    ],
)
def test_a_teachers_server_on_the_trainers_gpu_counts_with_the_share_that_it_is_started_with(
    large_model: Path, flags: str, refused: str | None
) -> None:
    settings = read_settings(["--model-name", str(large_model), *TEACHER, *ON_100_GB.split(), *flags.split()])
    if refused is None:
        fit_to_gpu(settings)
        return
    with pytest.raises(DoesNotFit) as raised:
        fit_to_gpu(settings)
    assert refused in str(raised.value)


def test_the_share_that_is_advised_holds_policy_and_teacher(large_model: Path) -> None:
    run = ["--model-name", str(large_model), *TEACHER, *ON_100_GB.split(), "--fit", "auto"]
    raised, _ = fit_to_gpu(read_settings([*run, "--gpu-memory-utilization", "0.3"]))
    assert raised.trainer.gpu_memory_utilization == 0.46, "the half of it holds what 0.23 holds without a teacher"
    beside, _ = fit_to_gpu(read_settings([*run, "--teacher.gpu", "0", "--gpu-memory-utilization", "0.4"]))
    assert beside.trainer.gpu_memory_utilization < 0.3, "both need them"
    with pytest.raises(DoesNotFit, match=r"another one for the teacher \(--teacher\.gpu\)"):
        fit_to_gpu(read_settings([*run, "--teacher.vllm.gpu_memory_utilization", "0.9"]))


def test_servers_with_a_share_of_their_own_on_one_gpu_count_together(large_model: Path) -> None:
    run = ["--model-name", str(large_model), "--weight-bridge-mode", "shared_vllm", "--num-inference-nodes", "2"]
    run += ["--gpu-memory-gb", "80", "--fit", "auto"]
    with pytest.raises(DoesNotFit, match=r"vLLM's share 72\.0"):
        fit_to_gpu(read_settings([*run, "--vllm.gpu-memory-utilization", "0.45"]))
