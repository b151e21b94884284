"""Whole checkpoints for registered servers: from a shared disk or by download, and never half of one."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import httpx
import pytest

from example_trainer.errors import CannotShare, PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.serving import checkpoint_download
from example_trainer.serving.checkpoint_download import download
from example_trainer.serving.checkpoint_shapes import CheckpointUnreadable
from example_trainer.weight_protocol.checkpoint_files import CheckpointFile, CheckpointSource, describe, is_whole
from example_trainer.weights import checkpoint_delivery
from example_trainer.weights.checkpoint_delivery import CheckpointDelivery, CheckpointServer
from example_trainer.weights.members import Member, MemberCalls
from example_trainer.weights.testing import config_of

from .test_members import info_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def _hurries(monkeypatch):
    monkeypatch.setattr(checkpoint_download, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "policy-v1"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(os.urandom(300_000))
    (directory / "empty").touch()
    return directory


@pytest.fixture
def server():
    made = CheckpointServer()
    yield made
    made.close()


@pytest.fixture
def copy(tmp_path):
    directory = tmp_path / "copy"
    directory.mkdir()
    return directory


async def test_a_server_that_does_not_see_the_disk_downloads_every_file_whole(checkpoint, server, copy):
    source = server.offer(checkpoint, describe(checkpoint))
    assert not is_whole(copy, source.files)
    await download(source, copy)
    assert is_whole(copy, source.files)


async def test_a_download_that_broke_off_is_continued_where_it_ended(checkpoint, server, copy):
    whole = (checkpoint / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:100_000])
    seen = []
    handle = httpx.HTTPTransport()

    class Noting(httpx.BaseTransport):
        def handle_request(self, request):
            seen.append((request.url.path, request.headers.get("range")))
            return handle.handle_request(request)

        def close(self):
            handle.close()

    source = server.offer(checkpoint, describe(checkpoint))
    await download(source, copy, transport=Noting())
    assert ("/model.safetensors", "bytes=100000-") in seen
    assert is_whole(copy, source.files)


async def test_a_file_with_other_bytes_is_fetched_again_from_its_beginning(checkpoint, server, copy):
    (copy / "model.safetensors").write_bytes(os.urandom(300_000))
    source = server.offer(checkpoint, describe(checkpoint))
    await download(source, copy)
    assert is_whole(copy, source.files)


async def test_a_file_that_is_never_whole_is_not_a_checkpoint(checkpoint, server, copy):
    source = server.offer(checkpoint, describe(checkpoint))
    (checkpoint / "model.safetensors").write_bytes(os.urandom(300_000))
    with pytest.raises(CheckpointUnreadable, match="its checksum is another"):
        await download(source, copy)


async def test_a_server_whose_disk_is_full_says_which(checkpoint, server, copy, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_download, "_continue", full)
    with pytest.raises(CheckpointUnreadable, match=r"copy cannot hold the checkpoint: No space left.*TMPDIR"):
        await download(server.offer(checkpoint, describe(checkpoint)), copy)


@pytest.mark.parametrize("change", ["secret", "name"])
async def test_only_the_offered_files_are_given_and_only_for_the_secret(checkpoint, server, copy, change):
    (checkpoint.parent / "private").write_text("x")
    source = server.offer(checkpoint, describe(checkpoint)[:1])
    if change == "secret":
        source = source.model_copy(update={"secret": "another-secret"})
    else:
        source = source.model_copy(update={"files": describe(checkpoint)[1:]})
    with pytest.raises(CheckpointUnreadable, match=r"401|404"):
        await download(source, copy)


@pytest.mark.parametrize("name", ["../private", "a/b", "", ".hidden", "-flag"])
def test_a_file_outside_the_directory_cannot_be_named(name):
    with pytest.raises(ValueError, match="letters, digits"):
        CheckpointFile(name=name, size_bytes=1, digest="0" * 64)


class Client:
    """A server that reads checkpoints, and whose answer may get lost."""

    def __init__(self, name):
        self.url, self.name, self.patience_seconds = f"http://{name}", name, 600.0
        self.version, self.error, self.serves_anyway, self.read = None, None, False, []

    def info(self, **_):
        return info_of(policy_version=self.version, lora=False)

    def reload(self, directory, version, *, drain_seconds, source):
        self.read.append((directory.name, source))
        if self.error is None or self.serves_anyway:
            self.version = version
        if self.error is not None:
            raise self.error
        return {"fence_seconds": 0.5, "drain_seconds": drain_seconds}


@pytest.fixture
def delivery(tmp_path, monkeypatch):
    def write(_, directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.safetensors").write_bytes(b"w" * 10)
        return directory

    monkeypatch.setattr(checkpoint_delivery, "write_served_checkpoint", write)
    config = config_of(
        *("http://127.0.0.1:9", "m"),
        registered_servers=True,
        weight_bridge_mode="none",
        restart_method="reload",
        run_dir=tmp_path,
    )
    calls = MemberCalls()
    made = CheckpointDelivery(config, calls)
    made.attach(SimpleNamespace())
    yield made
    made.close([])
    calls.close()


def members_of(*clients):
    return [Member(client, client.info()) for client in clients]


def test_each_server_reads_the_version_and_those_that_fail_are_lost(delivery):
    good, bad, late = Client("good"), Client("bad"), Client("late")
    bad.error = ServerRefused("no room", 422)
    late.error, late.serves_anyway = ServerUnavailable("the answer was lost"), True
    delivered = delivery.deliver(members_of(good, bad, late), 3, limit_seconds=1.0)
    assert sorted(member.client.name for member in delivered.served) == ["good", "late"]
    assert [member.client.name for member in delivered.lost] == ["bad"]
    assert delivered.cost.fence_seconds == 0.5
    ((directory, source),) = good.read
    assert (directory, [file.name for file in source.files]) == ("policy-v3", ["model.safetensors"])


def test_a_version_is_written_once_for_all_who_join_and_removed_after_the_next(delivery, tmp_path):
    first, joiner = Client("first"), Client("joiner")
    delivery.deliver(members_of(first), 3, limit_seconds=1.0)
    again = delivery.deliver(members_of(first, joiner), 3, limit_seconds=1.0)
    assert len(again.served) == 2
    assert (len(first.read), len(joiner.read)) == (1, 1), "a server that has the version reads nothing"
    assert isinstance(joiner.read[0][1], CheckpointSource)
    assert joiner.read[0][1] == first.read[0][1]
    delivery.deliver(members_of(first, joiner), 4, limit_seconds=1.0)
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["policy-v4"]


def test_a_port_that_torchrun_has_taken_is_not_listened_on(delivery, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        for name, value in {"ADDR": "127.0.0.1", "PORT": str(port)}.items():
            monkeypatch.setenv(f"MASTER_{name}", value)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        client = Client("only")
        assert len(delivery.deliver(members_of(client), 3, limit_seconds=1.0).served) == 1
    assert httpx.URL(client.read[0][1].url).port != port


def test_an_address_that_is_not_this_hosts_is_named_with_the_variables_to_set():
    with pytest.raises(PublishFailed, match=r"cannot be offered at 192.0.2.1:any port: .*set MASTER_ADDR"):
        CheckpointServer("192.0.2.1")


def test_a_server_that_cannot_load_a_checkpoint_is_refused_with_the_flag_to_leave_out(delivery):
    with pytest.raises(CannotShare, match="without --enable-lora"):
        delivery.examine(info_of(lora=True), "http://a")
    with pytest.raises(CannotShare, match="without --share-weights"):
        delivery.examine(info_of(lora=False, sharing=True), "http://a")
