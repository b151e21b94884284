"""A server's temporary directory, and the shared memory named after a file in it, are removed when the server ends."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_trainer.processes.scratch import name_scratch, server_scratch

MEETING_FILE = "vllm_dist_5f"


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as memory:
        (Path(memory) / "vllm_dist_60-tp-cpushm_0").touch()  # of another program
        yield Path(memory)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own are too long for sockets
        monkeypatch.setattr(tempfile, "tempdir", parent)
        yield Path(parent)


def fill(scratch: Path, shared_memory: Path) -> None:
    (scratch / MEETING_FILE).touch()
    (shared_memory / f"{MEETING_FILE}-tp-cpushm_0").touch()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_"))


def test_a_server_that_ends_removes_its_directory_and_its_workers_memory(shared_memory: Path, temporary: Path) -> None:
    environ = {"TMPDIR": "/before"}
    with server_scratch(environ, shared_memory) as scratch:
        assert scratch.parent == temporary
        assert environ == {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
        fill(scratch, shared_memory)
    assert environ == {"TMPDIR": "/before"}
    assert (names(temporary), names(shared_memory)) == ([], ["vllm_dist_60-tp-cpushm_0"])


def test_the_next_server_removes_what_a_killed_one_left_and_nothing_of_a_running_one(
    shared_memory: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = temporary / "atropos-vllm-00000000"
    killed.mkdir()
    fill(killed, shared_memory)
    with server_scratch({}, shared_memory) as running:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        long_ago = time.time() - 3600
        for scratch in (killed, running):
            os.utime(scratch, (long_ago, long_ago))
        with server_scratch({}, shared_memory) as second:
            assert names(temporary) == sorted([running.name, second.name])
            assert names(shared_memory) == ["vllm_dist_60-tp-cpushm_0"]


def test_a_directory_leaves_room_for_a_sockets_name_whatever_letters_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("/home/ユーザー/一時ファイル置き場所", f"/home/{'u' * 60}"):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        socket_path = name_scratch("atropos-0123456789ab") / f"{'x' * 36}"
        assert len(os.fsencode(socket_path)) <= 107
