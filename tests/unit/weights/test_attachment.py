"""A trainer waits for the server it attaches to, and refuses one whose memory, model or manifest does not fit."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from example_trainer.errors import CannotShare, ProofFailed, ServerUnavailable, WaitTimedOut
from example_trainer.weight_protocol.client import NotYet
from example_trainer.weights.attachment import _check_boot
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import FakeServer, config_of, served_fake

from .test_shared_vllm import served_equals_masters


@pytest.mark.parametrize("boot_id", ["0123456789abcdee", "0123456789abcde", ""])
def test_a_manifest_of_another_start_than_the_servers_is_not_the_one_to_attach_to(boot_id):
    manifest = SimpleNamespace(boot_id="0123456789abcdef")
    _check_boot(Path("m"), manifest, SimpleNamespace(boot_id=manifest.boot_id))
    with pytest.raises(NotYet, match="another start"):
        _check_boot(Path("m"), manifest, SimpleNamespace(boot_id=boot_id))


def test_a_server_that_reads_other_memory_than_is_mapped_here_is_found(shared, monkeypatch):
    _, bridge = shared()
    attachment = bridge._attach()
    attachment.check_memory()
    monkeypatch.setattr(attachment.client, "checksum", lambda: "of other memory")
    with pytest.raises(ProofFailed, match="does not serve what is written here"):
        attachment.check_memory()
    attachment.close()


def test_the_header_is_marked_before_the_first_weight_is_written_and_after_the_last(shared):
    fake, bridge = shared()
    policy = bridge.prepare()
    seen, write = [], policy.write_served

    def watched():
        seen.append((fake.server.fence.publishing, fake.server.header.state().torn))
        write()
        seen.append((fake.server.fence.publishing, fake.server.header.state().torn))

    policy.write_served = watched
    bridge._check.proven.add(bridge._attached.boot_id)
    bridge.publish(1)
    assert seen == [(True, True), (True, True)]


def test_other_weights_at_the_server_are_replaced_with_a_warning(shared, tiny_family, tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_family("qwen2"))
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(other)
    fake, _ = shared("qwen2")
    bridge = SharedVllmBridge(config_of(fake.url, other))
    with caplog.at_level(logging.WARNING):
        policy = bridge.prepare()
    assert "1 of 39 tensors differ, model.norm.weight first" in caplog.text
    bridge.publish(1)
    assert served_equals_masters(policy)
    bridge.close()
    frozen = SharedVllmBridge(config_of(fake.url, tiny_family("qwen2"), train_layer_indices="1"))
    with pytest.raises(CannotShare, match=r"not trained differ .*model\.norm\.weight"):
        frozen.prepare()


def test_a_trainer_started_first_waits_with_a_line_and_goes_on(tiny_family, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("atropos_api.common.concurrency.WAIT_LINE_SECONDS", 0.2)
    with served_fake(tiny_family("qwen2"), tmp_path / "manifest") as fake:
        hidden = fake.server.manifest_path.rename(tmp_path / "not yet")
        manifest = str(fake.server.manifest_path)
        bridge = SharedVllmBridge(config_of(fake.url, tiny_family("qwen2"), vllm_config_path=manifest))
        appear = threading.Timer(0.7, lambda: hidden.rename(fake.server.manifest_path))
        appear.start()
        began = time.monotonic()
        with caplog.at_level(logging.INFO):
            bridge.prepare()
        waited_seconds = time.monotonic() - began
        bridge.close()
        appear.join()
    assert 2 <= caplog.text.count("waiting for the vLLM server") <= 1 + waited_seconds / 0.2
    assert caplog.text.count("Parameter mapping file not found") == 1, "the long reason is logged once"
    assert "s): still the same" in caplog.text


def test_waiting_ends_with_the_reason_and_the_flag(tiny_family):
    bridge = SharedVllmBridge(config_of("http://127.0.0.1:9", tiny_family("qwen2"), wait_timeout=0.3))
    with pytest.raises(WaitTimedOut, match=r"Parameter mapping file not found.*--wait-timeout"):
        bridge.prepare()


def test_waiting_names_a_look_up_that_failed(tiny_family, monkeypatch):
    """The lines named only a missing file, while the name server did not answer."""

    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    here = config_of("http://127.0.0.1:9001", tiny_family("qwen2"), wait_timeout=0.3)
    bridge = SharedVllmBridge(here.model_copy(update={"vllm_host": "server.test"}))
    with pytest.raises(WaitTimedOut, match=r"server\.test:9001 does not answer.*Temporary failure in name resolution"):
        bridge.prepare()


@pytest.mark.usefixtures("no_such_name")
def test_a_host_that_no_lookup_knows_is_reported_at_once(tiny_family):
    here = config_of("http://127.0.0.1:9001", tiny_family("qwen2"))
    bridge = SharedVllmBridge(here.model_copy(update={"vllm_host": "no-such-host.invalid"}))
    started = time.monotonic()
    with pytest.raises(ServerUnavailable, match=r"--vllm-host no-such-host\.invalid"):
        bridge.prepare()
    assert time.monotonic() - started < 30


def test_a_server_that_does_not_share_is_refused_with_what_to_do(shared, monkeypatch):
    fake, bridge = shared("qwen2")
    fake.server.manifest_path.unlink()
    told = {"boot_id": "b", "sharing": False, "how_to_share": "set VLLM_ENABLE_SHARED_WEIGHTS=1"}

    async def tell(*_):
        return told

    monkeypatch.setattr(FakeServer, "_info", tell)
    with pytest.raises(CannotShare, match="VLLM_ENABLE_SHARED_WEIGHTS=1"):
        bridge.prepare()


def test_what_a_server_cannot_share_is_refused_at_start(shared, monkeypatch):
    _, bridge = shared("qwen2")
    info = FakeServer._info

    async def tell(self, body):
        return {**await info(self, body), "lora": True}

    monkeypatch.setattr(FakeServer, "_info", tell)
    with pytest.raises(CannotShare, match="--enable-lora"):
        bridge.prepare()
