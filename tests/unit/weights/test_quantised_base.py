"""The base of `--load-in-4bit`: its values are written once and served; a server of another base is refused."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from example_trainer.errors import CannotSwap, PublishFailed
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.lora import AdapterOptions
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weight_protocol.base_record import RECORD_NAME, read_base_record
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weights.lora_only import LoraOnlyBridge, SeveralServersBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.served_model import base_digest, prepare_base
from example_trainer.weights.testing import config_of

pytest.importorskip("bitsandbytes")

PROGRAM = (sys.executable, "-m", "example_trainer.serving.testing")


@pytest.fixture
def options(tiny_family):
    """A function that makes the options of a policy on a base in 4 bits."""

    def make(*, dtype="float32", family="llama", quantise="nf4", **adapter):
        adapters = AdapterOptions(**{"r": 4, "alpha": 8, **adapter}, quantise=quantise)
        return PolicyOptions(model_name=str(tiny_family(family)), dtype=dtype, device="cpu", adapter=adapters)

    return make


@pytest.fixture
def start_server():
    """A function that starts a stand-in for an inference server of a model, and returns its address."""
    processes = []

    def start(model):
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [*PROGRAM, "--port", url.rpartition(":")[2], "--model", str(model)]
        processes.append(subprocess.Popen(command))
        deadline = time.monotonic() + 60
        while not _answers(url) and time.monotonic() < deadline:
            time.sleep(0.05)
        return url

    yield start
    for process in processes:
        process.kill()
        process.wait()


def _answers(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def closing():
    """A list of bridges that are closed with the test."""
    bridges = []
    yield bridges
    for bridge in bridges:
        bridge.close()


@pytest.fixture
def trainer(tiny_family, tmp_path):
    """A function from a mode to a trainer with a base in four bits, and its options for a stand-in server."""

    def make(mode, **changes):
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        usual = {"weight_bridge_mode": mode, "run_dir": tmp_path, "dtype": "float32", "device": "cpu"}
        usual |= {"load_in_4bit": True, "lora_r": 4}
        config = config_of(url, tiny_family("llama"), **usual, wait_timeout=60, **changes)
        return config, replace(VllmOptions.of(config), program=PROGRAM)

    return make


def test_the_values_that_forwards_compute_with_are_written_and_found_again(options, tmp_path):
    policy, directory = load_policy(options(dtype="bfloat16")), tmp_path / "served" / "base"
    (tmp_path / "served" / ".base.part").mkdir(parents=True)  # of a trainer that was killed
    base = prepare_base(policy, directory)
    assert (base.model, base.digest) == (directory, read_base_record(directory).digest)
    written = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    values = policy.base_tensors(policy.dtype)
    assert all(torch.equal(written[name], tensor) for name, tensor in values.items())
    inode = directory.stat().st_ino
    assert prepare_base(load_policy(options(dtype="bfloat16", r=8, target_modules=("o_proj",))), directory) == base
    assert directory.stat().st_ino == inode, "another adapter on the same base writes nothing"
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["base"]


def test_a_base_of_other_values_or_without_a_record_is_written_anew(options, tmp_path):
    policy, directory = load_policy(options()), tmp_path / "base"
    digests = {base_digest(policy)}
    for other in (options(dtype="bfloat16"), options(family="qwen2")):
        digests.add(prepare_base(load_policy(other), directory).digest)
    assert len(digests) == 3, "the dtype and the weights count"
    assert prepare_base(policy, directory).digest == read_base_record(directory).digest
    for damage in ("", "{", '{"digest": 1}'):
        (directory / RECORD_NAME).write_text(damage)
        assert read_base_record(directory) is None
        prepare_base(policy, directory)
        assert read_base_record(directory) is not None


@pytest.mark.parametrize("damage", ["a part", "missing"])
def test_a_base_that_was_copied_in_part_is_written_anew(options, tmp_path, damage):
    """Its record may have been copied before its weights, and each server that loaded it failed."""
    policy, directory = load_policy(options()), tmp_path / "base"
    prepare_base(policy, directory)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if damage == "a part":
        weights.write_bytes(whole[:-1])
    assert read_base_record(directory) is None
    prepare_base(policy, directory)
    assert weights.read_bytes() == whole


def test_a_disk_without_room_is_reported_before_anything_is_written(options, tmp_path, monkeypatch):
    policy, directory = load_policy(options()), tmp_path / "served" / "base"
    needed = sum(tensor.numel() * 4 for tensor in policy.base_tensors(torch.float32).values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(PublishFailed, match=r"the weights need .* GiB and its disk has .* set --run-dir elsewhere"):
        prepare_base(policy, directory)
    assert list((tmp_path / "served").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert prepare_base(policy, directory).model == directory


def test_matrices_in_four_bits_take_little_more_than_a_quarter_of_those_in_sixteen(options):
    """The scales are quantised too: 4.127 bits a weight, and tables of 1.1 kB a matrix, which count in a tiny model."""

    def stored_bytes(quantise):
        state = load_policy(options(dtype="bfloat16", quantise=quantise)).module.state_dict()
        return sum(tensor.nbytes for name, tensor in state.items() if "_proj" in name and ".lora_" not in name)

    assert 0.25 < stored_bytes("nf4") / stored_bytes(None) < 0.33


def test_lora_only_starts_its_server_on_the_values_of_the_base(trainer, tmp_path, closing):
    config, vllm = trainer("lora_only")
    bridge = LoraOnlyBridge(config, vllm=vllm)
    closing.append(bridge)
    digest = base_digest(bridge.prepare())
    first = ServerClient(config.vllm_url).info()
    bridge._manager._server.stop(grace_seconds=5)
    bridge._restart_exited()
    second = ServerClient(config.vllm_url).info()
    assert first.boot_id != second.boot_id
    for info in (first, second):
        assert (info.model, info.base_digest) == (str(tmp_path / "served/base"), digest)


def test_lora_restart_starts_each_server_on_the_values_of_the_base(trainer, tmp_path, closing):
    bridge = RestartBridge(*trainer("lora_restart"))
    closing.append(bridge)
    bridge._prove = lambda *_: None
    digest = base_digest(bridge.prepare())
    for version in (1, 2):
        bridge.publish(version)
        info = ServerClient(bridge._manager.url).info()
        assert (info.policy_version, info.model, info.base_digest) == (version, str(tmp_path / "served/base"), digest)


def test_a_server_of_somebody_else_is_used_if_it_has_the_base_and_refused_in_one_line_if_not(
    options, trainer, tmp_path, closing, start_server
):
    policy = load_policy(options())
    base = prepare_base(policy, tmp_path / "served" / "base")
    right, wrong = start_server(base.model), start_server(policy.tokenizer_name)

    def bridge_to(*urls):
        config, vllm = trainer("lora_only", inference_urls=urls, num_inference_nodes=len(urls))
        several = len(urls) > 1
        closing.append(SeveralServersBridge(config) if several else LoraOnlyBridge(config, urls[0], vllm=vllm))
        return closing[-1]

    bridge_to(right).prepare()
    bridge_to(right, right).prepare()
    for urls in ((wrong,), (right, wrong)):
        with pytest.raises(CannotSwap, match="the unquantised model") as refused:
            bridge_to(*urls).prepare()
        text = str(refused.value)
        assert wrong in text
        assert f"--model {tmp_path / 'served/base'} --tokenizer {policy.tokenizer_name} " in text
        assert "\n" not in text
    assert not (tmp_path / "logs").exists(), "no second server was started"
