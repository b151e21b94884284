"""`atropos doctor RUN.yaml` finds what this machine lacks for a run, and prints all findings at once."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer.commands import main
from example_trainer.commands.doctor import requested_run, resource_checks
from example_trainer.config import TrainingConfig
from example_trainer.memory.shapes import local_shape
from tests.unit.commands.doctor_harness import DoctorHarness


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def give_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(requested_run, "count_gpus", lambda _: count)


def test_a_port_that_is_taken_is_found(harness: DoctorHarness, taken_port: int) -> None:
    harness.sections["vllm"]["port"] = taken_port
    harness.find_one("ports", f"vllm.port: port {taken_port} is taken")


def test_an_option_that_the_broker_does_not_take_is_found(harness: DoctorHarness) -> None:
    harness.sections["api"] = {"max_connections": 0}
    harness.find_one("broker", "--api.max-connections: Input should be greater than or equal to 1")


def test_a_taken_port_for_metrics_is_found(harness: DoctorHarness, taken_port: int) -> None:
    harness.sections["trainer"]["metrics_port"] = taken_port
    harness.find_one("ports", f"trainer.metrics_port: port {taken_port} is taken")


def test_a_port_that_two_programs_ask_for_is_found(harness: DoctorHarness) -> None:
    port = harness.sections["vllm"]["port"]
    harness.sections["api"] = {"port": port}
    harness.find_one("ports", f"port {port} is asked for 2 times: by api.port and vllm.port")


def test_ports_of_several_servers_are_counted_upwards(harness: DoctorHarness, taken_port: int) -> None:
    harness.sections["trainer"]["num_inference_nodes"] = 2
    harness.sections["vllm"]["port"] = taken_port - 1
    harness.find_one("ports", f"vllm.port (server 2): port {taken_port} is taken")


def test_a_number_that_is_not_a_port_is_found(harness: DoctorHarness) -> None:
    harness.sections["api"] = {"port": 70000}
    harness.find_one("ports", "api.port 70000")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda"}, "trainer.device cuda: this machine has no GPU"),
        ({"device": "cuda:x"}, "trainer.device cuda:x is not a device"),
        ({"vllm_gpu": 1}, "trainer.vllm_gpu 1 needs GPU 1: this machine has no GPU"),
        ({"num_inference_nodes": 2, "broadcast_backend": "nccl"}, "nccl needs a GPU"),
        ({"weight_bridge_mode": "none", "vllm_tensor_parallel_size": 2}, "tensor parallelism of 2 needs 2 GPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_found(
    harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], words: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    give_gpus(monkeypatch, 0)
    harness.sections["trainer"] |= settings
    harness.find_one("gpu", words)


def test_a_gpu_beyond_the_last_is_found_and_an_existing_one_is_not_a_fault(
    harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_checks, "_version", {"vllm": "0.32.0"}.get)
    monkeypatch.setattr(resource_checks, "check_packages", lambda _: iter(()))
    give_gpus(monkeypatch, 2)
    harness.sections["trainer"] |= {"device": "cuda:2", "vllm_gpu": 1}
    found = [one for one in harness.find() if one.subject == "gpu"]
    assert ["trainer.device cuda:2" in one.text and "2 GPUs, numbered from 0" in one.text for one in found] == [True]


def test_gpus_are_counted_by_their_device_files_and_cuda_visible_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert requested_run.count_gpus({}, tmp_path) == 2
    assert requested_run.count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert requested_run.count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert requested_run.count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


def test_a_run_that_does_not_fit_the_gpu_is_found_with_what_does(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["gpu_memory_gb"] = 1.0
    assert "larger GPU" in harness.find_one("memory", "on a GPU of 1.0 GB").advice
    harness.sections["trainer"]["gpu_memory_gb"] = 80.0
    assert harness.find() == []
    harness.sections["trainer"] |= {"gpu_memory_gb": 1.0, "train_layer_indices": "5-6"}
    harness.find_one("layers", "5-6")


def test_checkpoints_that_the_disk_has_no_room_for_are_found(
    harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.sections["trainer"] |= {"training_steps": 10, "checkpoint_interval": 2}
    size = sum(each.numel() for each in harness.tensors().values()) * 12
    usage = shutil.disk_usage(harness.folder)
    monkeypatch.setattr(resource_checks.shutil, "disk_usage", lambda _: usage._replace(free=4.5 * size))
    assert "trainer.keep_last to 3" in harness.find_one("disk", "5 checkpoints").advice
    harness.sections["trainer"]["keep_last"] = 3
    assert harness.find() == []


def test_a_checkpoint_holds_masters_and_states_of_what_is_trained_and_the_rest_as_served(
    harness: DoctorHarness,
) -> None:
    """fp32 masters and AdamW's two moments are twelve bytes a weight; an adapter has those of its two matrices only."""
    count = sum(each.numel() for each in harness.tensors().values())
    shape = local_shape(str(harness.model))
    assert shape is not None

    def size(**settings: object) -> float:
        return resource_checks.checkpoint_bytes(
            shape, TrainingConfig(model_name="m", optimizer="adamw", dtype="bfloat16", **settings)
        )

    assert size() == pytest.approx(count * 12, rel=0.01)
    one_layer = sum(each.numel() for name, each in harness.tensors().items() if ".layers.1." in name)
    assert size(train_layer_indices="last-1") == pytest.approx(one_layer * 12 + (count - one_layer) * 2, rel=0.01)
    adapter = {"weight_bridge_mode": "lora_only", "lora_r": 8, "lora_target_modules": ["q_proj"]}
    assert size(**adapter) == 2 * 8 * (128 + 128) * 12


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"weight_bridge_mode": "shared_vllm"}, 0),
        ({"weight_bridge_mode": "none"}, 2),
        ({"weight_bridge_mode": "lora_only", "load_in_4bit": True, "lora_r": 1}, 1),
        ({"weight_bridge_mode": "lora_restart", "load_in_4bit": True, "lora_r": 1}, 1),
    ],
)
def test_weights_that_are_written_for_the_server_are_counted_with_the_checkpoints(
    harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], copies: int
) -> None:
    harness.sections["trainer"] |= settings
    shape = local_shape(str(harness.model))
    assert shape is not None
    config = TrainingConfig(model_name="m", optimizer="adamw", dtype="float32", **settings)
    needed = resource_checks.checkpoint_bytes(shape, config) + copies * shape.parameters * 4
    usage = shutil.disk_usage(harness.folder)
    monkeypatch.setattr(resource_checks.shutil, "disk_usage", lambda _: usage._replace(free=needed * 0.99))
    (found,) = [one for one in harness.find() if one.subject == "disk"]
    assert ("the weights written for the server" in found.text) == bool(copies)
    monkeypatch.setattr(resource_checks.shutil, "disk_usage", lambda _: usage._replace(free=needed * 1.1))
    assert [one.text for one in harness.find() if one.subject == "disk"] == []


def test_a_directory_that_cannot_be_written_is_found(harness: DoctorHarness) -> None:
    (harness.folder / "file").touch()
    harness.sections["trainer"]["save_path"] = str(harness.folder / "file" / "checkpoints")
    harness.find_one("disk", "is not a directory")
    harness.sections["trainer"] |= {"save_path": str(harness.folder), "run_dir": str(harness.folder / "file" / "run")}
    harness.find_one("disk", "file/run", "is not a directory")


def test_a_run_directory_with_the_metrics_of_another_run_is_found(harness: DoctorHarness) -> None:
    (harness.folder / "run").mkdir()
    (harness.folder / "run/metrics.jsonl").touch()
    assert "--resume auto" in harness.find_one("run directory", "already holds the metrics").advice


def test_too_little_shared_memory_for_the_weights_is_found(
    harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, 0)
    usage = SimpleNamespace(total=1 << 40, used=0, free=1 << 40)
    small = SimpleNamespace(total=1 << 16, used=0, free=1 << 16)
    monkeypatch.setattr(
        resource_checks.shutil, "disk_usage", lambda path: small if path == resource_checks.SHARED_MEMORY else usage
    )
    assert "--shm-size" in harness.find_one("shared memory", "the shared weights need").advice
    harness.sections["trainer"]["weight_bridge_mode"] = "lora_only"
    assert harness.find() == []


def test_missing_and_unsupported_packages_are_found(harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return "1.13.1" if name == "torch" else known(name)

    known = metadata.version
    monkeypatch.setattr(resource_checks.metadata, "version", version)
    harness.sections["trainer"]["weight_bridge_mode"] = "lora_only"
    found = harness.find()
    assert [one.subject for one in found] == ["packages", "packages"]
    assert "torch 1.13.1 is outside the supported >=2.11" in found[0].text
    assert "peft is not installed, and weight_bridge_mode lora_only needs it" in found[1].text
    assert found[1].advice == "pip install 'peft>=0.17'"


def test_a_setting_without_effect_in_the_mode_is_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["restart_method"] = "reload"
    harness.find_one("settings", "--restart-method reload has no effect", verdict="warning")


def test_all_findings_are_reported_at_once_and_errors_end_with_1(
    harness: DoctorHarness, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.edit("config.json", tie_word_embeddings=True)
    (harness.model / "tokenizer.json").unlink()
    harness.sections["vllm"] = {"port": taken_port, "logprobs_mode": "raw_logits"}
    harness.sections["trainer"] |= {"device": "cuda:9", "max_model_len": 2000, "train_layer_indices": "last-7"}
    assert main.run(["doctor", str(harness.run_file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    told = [line.split()[1] for line in lines if line.startswith(("error", "warning"))]
    assert sorted(told) == sorted(["layers", "lengths", "output", "tokenizer", "logprobs", "ports", "gpu"])
    assert sum(line.lstrip().startswith("do: ") for line in lines) == len(told)
    assert "run.yaml: 7 errors" in lines[-1]


def test_a_run_without_errors_ends_with_0_and_takes_the_launchers_flags(
    harness: DoctorHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["doctor", str(harness.run_file)]) == 0
    assert "nothing wrong was found" in capsys.readouterr().out
    assert main.run(["doctor", str(harness.run_file), "--restart-method", "reload"]) == 0
    assert "1 warning" in capsys.readouterr().out
    assert not (harness.folder / "run").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no-such.yaml"], "--config no-such.yaml: no such file"),
        (["RUN", "--sed", "1"], "unknown option --sed, did you mean --seed?"),
        (["RUN", "RUN"], "takes one run file"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(harness: DoctorHarness, words: list[str], told: str) -> None:
    arguments = [str(harness.run_file) if word == "RUN" else word for word in words]
    with pytest.raises(ConfigError) as refused:
        main.run(["doctor", *arguments])
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_misspelt_key_of_the_trainer_is_reported_in_one_line(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["batch_sise"] = 4
    with pytest.raises(ConfigError, match=r"unknown key 'batch_sise', did you mean batch_size\?"):
        harness.find()
