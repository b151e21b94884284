"""`atropos doctor RUN.yaml` examines the teacher whose server the launcher would start, like the policy's."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from example_trainer.commands.doctor import requested_run
from example_trainer.launcher.run_file import read_settings
from example_trainer.launcher.teacher import unused_distillation
from tests.unit.commands.doctor_harness import DoctorHarness


@pytest.fixture
def distilled(harness: DoctorHarness) -> DoctorHarness:
    """The run file of the guide to distillation, with tiny models."""
    shutil.copytree(harness.model, harness.folder / "teacher")
    questions = harness.folder / "questions.jsonl"
    questions.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n', encoding="utf-8")
    harness.sections["trainer"]["distill"] = "forward_kl"
    harness.sections["env"] = {
        "server": "distill_server.py",
        "data_path": str(questions),
        "val_data_path": str(questions),
        "teacher_top_k": 8,
        "group_size": 8,
        "max_token_length": 64,
        "use_wandb": False,
    }
    harness.sections["openai"] = {"server_type": "vllm"}
    harness.sections["teacher"] = {"model_name": str(harness.folder / "teacher"), "vllm": {"max_num_seqs": 64}}
    return harness


def test_a_healthy_run_with_a_teacher_of_its_own_has_no_finding(distilled: DoctorHarness) -> None:
    assert distilled.find() == []


def test_a_teacher_s_model_that_is_missing_or_incomplete_is_found(distilled: DoctorHarness) -> None:
    Path(distilled.folder / "teacher/model.safetensors").unlink()
    distilled.find_one("model files", "teacher", "holds no weights")
    distilled.sections["teacher"]["model_name"] = "/nowhere"
    distilled.find_one("model", "teacher.model_name /nowhere: no such directory")


def test_a_teacher_of_another_vocabulary_is_found(distilled: DoctorHarness) -> None:
    path = distilled.folder / "teacher/tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    distilled.find_one("tokenizer", "teacher.model_name", "another vocabulary")


def test_a_teacher_s_port_that_is_taken_or_another_program_s_is_found(distilled: DoctorHarness) -> None:
    distilled.sections["teacher"]["vllm"]["port"] = distilled.sections["vllm"]["port"]
    distilled.find_one("ports", "by vllm.port and teacher.vllm.port")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        distilled.find_one("ports", f"port {port} is taken", flags=("--teacher.vllm.port", str(port)))


def test_a_teacher_s_gpu_that_is_not_there_is_found(distilled: DoctorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requested_run, "count_gpus", lambda _: 2)
    distilled.sections["trainer"]["device"] = "cpu"
    distilled.sections["teacher"]["gpu"] = "1,2"
    distilled.find_one("gpu", "teacher.gpu 2: this machine has 2 GPUs")
    distilled.sections["teacher"]["gpu"] = 1
    assert distilled.find() == []


def test_a_run_that_distils_without_a_teacher_is_found(distilled: DoctorHarness) -> None:
    del distilled.sections["teacher"]
    distilled.sections["env"] |= {"teacher_enabled": False}
    distilled.find_one("settings", "--distill forward_kl has no effect unless", verdict="warning")
    settings = read_settings(["--config", str(distilled.run_file)])
    assert [remark for remark in settings.remarks if remark.startswith("--distill")] == unused_distillation(settings)
