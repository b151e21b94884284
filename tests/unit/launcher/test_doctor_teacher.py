"""`atropos doctor RUN.yaml` examines the teacher whose server the launcher would start, as it does the policy's."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from example_trainer.commands.doctor import asked
from tests.unit.launcher.doctor_bench import Bench


@pytest.fixture
def distilled(bench: Bench) -> Bench:
    """The run file of the guide to distillation, with tiny models."""
    shutil.copytree(bench.model, bench.folder / "teacher")
    questions = bench.folder / "questions.jsonl"
    questions.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n', encoding="utf-8")
    bench.sections["trainer"]["distill"] = "forward_kl"
    bench.sections["env"] = {
        "server": "distill_server.py",
        "data_path": str(questions),
        "val_data_path": str(questions),
        "teacher_top_k": 8,
        "group_size": 8,
        "max_token_length": 64,
        "use_wandb": False,
    }
    bench.sections["openai"] = {"server_type": "vllm"}
    bench.sections["teacher"] = {"model_name": str(bench.folder / "teacher"), "vllm": {"max_num_seqs": 64}}
    return bench


def test_a_healthy_run_with_a_teacher_of_its_own_has_no_finding(distilled: Bench) -> None:
    assert distilled.find() == []


def test_a_teacher_s_model_that_is_missing_or_incomplete_is_found(distilled: Bench) -> None:
    Path(distilled.folder / "teacher/model.safetensors").unlink()
    distilled.find_one("model files", "teacher", "holds no weights")
    distilled.sections["teacher"]["model_name"] = "/nowhere"
    distilled.find_one("model", "teacher.model_name /nowhere: no such directory")


def test_a_teacher_of_another_vocabulary_is_found(distilled: Bench) -> None:
    path = distilled.folder / "teacher/tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    distilled.find_one("tokenizer", "teacher.model_name", "another vocabulary")


def test_a_teacher_s_port_that_is_taken_or_another_program_s_is_found(distilled: Bench) -> None:
    distilled.sections["teacher"]["vllm"]["port"] = distilled.sections["vllm"]["port"]
    distilled.find_one("ports", "by vllm.port and teacher.vllm.port")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        distilled.find_one("ports", f"port {port} is taken", flags=("--teacher.vllm.port", str(port)))


def test_a_teacher_s_gpu_that_is_not_there_is_found(distilled: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "count_gpus", lambda _: 2)
    distilled.sections["trainer"]["device"] = "cpu"
    distilled.sections["teacher"]["gpu"] = "1,2"
    distilled.find_one("gpu", "teacher.gpu 2: this machine has 2 GPUs")
    distilled.sections["teacher"]["gpu"] = 1
    assert distilled.find() == []
