"""`atropos doctor RUN.yaml` finds faults of the model, each put alone into the files of a tiny one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.commands.doctor_harness import DoctorHarness

ROOT = Path(__file__).parents[3]
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def test_a_healthy_run_has_no_findings(harness: DoctorHarness) -> None:
    harness.chat()
    assert harness.find() == []


def test_the_demos_run_file_has_no_findings_in_five_seconds_of_computing_without_a_heavy_library() -> None:
    code = (
        "import sys; from example_trainer.commands.doctor.examination import examine_run;"
        "found = examine_run(['--config', 'configs/demo.yaml']);"
        "heavy = [name for name in ('torch', 'vllm', 'transformers') if name in sys.modules];"
        "sys.exit(str(found + heavy) if heavy or any(one.verdict != 'note' for one in found) else 0)"
    )
    before = _children_seconds()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert _children_seconds() - before < 5.0


def _children_seconds() -> float:
    """Return the CPU time of ended children; wall time would depend on the machine's other load."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_path_without_a_model_is_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["model_name"] = "/no/such/model"
    harness.find_one("model", "/no/such/model", "no such directory")


def test_a_hub_model_that_is_not_here_is_found_with_the_command_that_fetches_it(
    harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.sections["trainer"]["model_name"] = "nobody/nothing-here"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = harness.find_one("model", "nobody/nothing-here", "HF_HUB_OFFLINE forbids")
    assert found.advice == "hf download nobody/nothing-here"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    harness.find_one("model", "would download it", verdict="warning")


def test_a_hub_model_in_the_cache_is_examined_and_what_it_lacks_can_be_downloaded(
    harness: DoctorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    snapshot = harness.folder / "hub/models--org--tiny/snapshots/abc"
    shutil.copytree(harness.model, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(harness.folder / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    harness.sections["trainer"]["model_name"] = "org/tiny"
    harness.chat()
    assert harness.find() == []
    (snapshot / "chat_template.jinja").write_text("<|user|>{{ messages[0].text }}")
    harness.find_one("chat template", "leaves out the user's message")
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (snapshot / name).unlink()
    found = harness.find_one("model", "lacks weights or tokenizer", "would download", verdict="warning")
    assert found.advice == "hf download org/tiny"


def test_a_task_that_no_tiny_model_is_made_for_is_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["model_name"] = "tiny/chian"
    assert "tiny/chain" in harness.find_one("model", "tiny/chian").advice


def test_a_reference_and_a_checkpoint_that_are_not_there_are_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"] |= {"ref_model": "/no/such/reference", "kl_coef": 0.001}
    harness.find_one("model", "ref_model /no/such/reference")
    harness.find_one("model", "resume /no/such/run", flags=("--resume", "/no/such/run", "--ref-model", "org/name"))


def test_missing_weights_are_found(harness: DoctorHarness) -> None:
    (harness.model / "model.safetensors").unlink()
    harness.find_one("model files", "holds no weights")


def test_a_missing_weight_file_of_several_is_found(harness: DoctorHarness) -> None:
    named = dict.fromkeys(harness.tensors(), "model.safetensors") | {"lm_head.weight": "model-2.safetensors"}
    (harness.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    harness.find_one("model files", "lacks 1 of 2 weight files", "model-2.safetensors")


def test_weights_that_were_cut_off_are_found(harness: DoctorHarness) -> None:
    path = harness.model / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    harness.find_one("model files", f"it has {size - 100} of {size} bytes")


def test_a_damaged_config_is_found(harness: DoctorHarness) -> None:
    (harness.model / "config.json").write_text('{"model_type": ')
    harness.find_one("model files", "config.json")


def test_a_model_that_is_not_a_language_model_is_found(harness: DoctorHarness) -> None:
    harness.edit("config.json", model_type="vit", architectures=["ViTModel"])
    found = harness.find()
    assert [(one.subject, one.verdict) for one in found] == [("model family", "error"), ("model family", "warning")]
    assert "'vit'" in found[0].text
    assert "ViTModel" in found[1].text


def test_a_model_that_changes_its_logits_is_found(harness: DoctorHarness) -> None:
    harness.edit("config.json", final_logit_softcapping=30.0)
    harness.find_one("model family", "final_logit_softcapping is 30.0")


def test_experts_are_found_where_weights_are_shared_and_allowed_elsewhere(harness: DoctorHarness) -> None:
    harness.edit("config.json", num_experts=8)
    assert "--weight-bridge-mode" in harness.find_one("server", "8 experts").advice
    harness.sections["trainer"]["weight_bridge_mode"] = "none"
    assert harness.find() == []


def test_layers_that_the_model_does_not_have_are_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["train_layer_indices"] = "20-31"
    assert "0-1" in harness.find_one("layers", "train_layer_indices '20-31'").advice


def test_an_adapter_on_the_head_is_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"] |= {"weight_bridge_mode": "lora_only", "lora_target_modules": ["q_proj", "lm_head"]}
    assert "q_proj" in harness.find_one("layers", "lora_target_modules lm_head", "inside its layers").advice


def test_a_context_longer_than_the_models_positions_is_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["max_model_len"] = 4096
    harness.find_one("lengths", "max_model_len 4096", "1024 positions")


def test_a_context_that_rope_scaling_reaches_is_not_a_fault(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["max_model_len"] = 4096
    harness.edit("config.json", rope_parameters={**ROPE, "rope_type": "linear", "factor": 4.0})
    assert harness.find() == []
    harness.edit("config.json", rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 4.0})
    harness.find_one("lengths", "max_model_len 4096", "1024 positions")


def test_training_sequences_longer_than_the_models_positions_are_found(harness: DoctorHarness) -> None:
    harness.sections["trainer"]["seq_len"] = 2048
    harness.find_one("lengths", "seq_len 2048", "1024 positions")


def test_answers_that_do_not_fit_the_server_or_the_trainer_are_found(harness: DoctorHarness) -> None:
    harness.chat(max_token_length=512)
    harness.find_one("lengths", "env.max_token_length 512", "max_model_len 256")
    harness.sections["trainer"]["max_model_len"] = 600
    harness.find_one("lengths", "env.max_token_length 512", "seq_len 256", verdict="warning")


def test_a_rope_scaling_of_the_server_alone_is_found(harness: DoctorHarness) -> None:
    harness.sections["vllm"]["hf_overrides"] = {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 2.0}}
    harness.find_one("rope", "vllm.hf_overrides", "not in the trainer")


def test_two_rope_settings_that_disagree_are_found(harness: DoctorHarness) -> None:
    harness.edit("config.json", rope_scaling={"rope_type": "linear", "factor": 2.0})
    harness.find_one("rope", "rope_scaling.rope_type linear", "rope_parameters.rope_type default")


def test_a_rope_scaling_that_falls_short_of_the_declared_length_is_found(harness: DoctorHarness) -> None:
    scaling = {**ROPE, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    harness.edit("config.json", rope_parameters=scaling)
    harness.find_one("rope", "reaches 512", "says 1024", verdict="warning")
    harness.edit("config.json", rope_parameters={**scaling, "rope_type": "llama3"})
    assert harness.find() == [], "Llama 3.1's own numbers are of this kind"


def test_a_head_called_tied_that_has_weights_of_its_own_is_found(harness: DoctorHarness) -> None:
    harness.edit("config.json", tie_word_embeddings=True)
    harness.find_one("output head", "tie_word_embeddings true", "lm_head.weight of its own")
    tensors = dict(harness.tensors())
    harness.store(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert harness.find() == [], "a stored copy of the embedding is the same head"


def test_a_head_that_is_neither_tied_nor_stored_is_found(harness: DoctorHarness) -> None:
    harness.store({name: tensor for name, tensor in harness.tensors().items() if name != "lm_head.weight"})
    harness.find_one("output head", "tie_word_embeddings false", "would be random")
    harness.edit("config.json", tie_word_embeddings=True)
    assert harness.find() == []
