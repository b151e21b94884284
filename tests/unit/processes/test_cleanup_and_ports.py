"""Shared memory is removed only if the run's own processes had mapped it and none maps it now."""

from __future__ import annotations

import io
import json
import mmap
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from example_trainer.processes.cleanup import SharedMemoryLedger, keep_watch, sweep
from example_trainer.processes.ports import PortTaken, free_port, free_ports, holder, listen, require_free
from example_trainer.processes.tree import MARK_VARIABLE, adopting_orphans, wait_until


def make(path: Path) -> mmap.mmap:
    path.write_bytes(b"0" * 4096)
    with path.open("r+b") as handle:
        return mmap.mmap(handle.fileno(), 4096)


def test_what_we_had_mapped_is_swept_and_nothing_else(tmp_path: Path) -> None:
    before = make(tmp_path / "before")
    ledger = SharedMemoryLedger(tmp_path)
    ours = make(tmp_path / "ours")
    (tmp_path / "foreign").write_bytes(b"0")
    assert ledger.observe([psutil.Process()]) == {"ours"}
    ours.close()
    assert ledger.sweep() == ["ours"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "foreign"]
    before.close()


def test_what_another_process_still_maps_stays(tmp_path: Path) -> None:
    mapping = make(tmp_path / "segment")
    assert sweep(["segment"], tmp_path) == []
    mapping.close()
    assert sweep(["segment", "never-there"], tmp_path) == ["segment"]


NOTES_ITS_SIGNALS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1]).open("a").write("SIGTERM "))
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(600)
"""


def test_who_does_not_end_with_a_killed_launcher_is_killed_after_one_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a second SIGTERM was added, so that on a busy node a program outlived its launcher by over 10 s."""
    monkeypatch.setattr("example_trainer.processes.cleanup.GRACE_SECONDS", 0.3)
    mark, signals = f"{tmp_path}.", tmp_path / "signals"
    with subprocess.Popen(
        [sys.executable, "-c", NOTES_ITS_SIGNALS, str(signals)], env={MARK_VARIABLE: mark}
    ) as stubborn:
        assert wait_until(signals.exists, 10)
        keep_watch(io.StringIO(json.dumps({"mark": mark, "temporary_dir": str(tmp_path / "scratch")})))
        assert stubborn.wait(10) == -9
    assert signals.read_text() == "SIGTERM "


def test_a_taken_port_is_reported_with_its_holder() -> None:
    assert require_free(free_port(), flag="--port") > 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = holder(port)
        assert found is not None
        assert found.pid == psutil.Process().pid
        with pytest.raises(PortTaken, match=rf"port {port} is taken by pid {found.pid} .*; choose another with --port"):
            require_free(port, flag="--port")


def test_a_port_that_nobody_holds_is_not_said_to_be_taken() -> None:
    """One below 1024 without the right to it, or one at an address that is not this machine's."""
    told = r"port 9001 cannot be used \(Cannot assign requested address\); choose another with --port"
    with pytest.raises(PortTaken, match=told):
        require_free(9001, flag="--port", host="203.0.113.1")


def test_a_port_that_was_chosen_is_given_to_no_other_process_and_can_be_listened_on_by_its_number() -> None:
    with ExitStack() as held:
        chosen = {*free_ports(50, held=held), free_port(held=held)}
        chosen.add(require_free(free_port(), flag="--port", held=held))
        assert len(chosen) == 52
        with ExitStack() as others:
            for port in chosen:
                stranger = others.enter_context(socket.socket())
                with pytest.raises(OSError, match="in use"):
                    stranger.bind(("127.0.0.1", port))
                others.enter_context(socket.create_server(("127.0.0.1", port)))
            assert chosen.isdisjoint(free_ports(500))
    with socket.socket() as anybody:
        anybody.bind(("127.0.0.1", chosen.pop()))


RELEASES = """
import socket, sys
from example_trainer.processes.ports import release_inherited
inherited = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
release_inherited()
with open("/dev/null") as opened:
    [each.close() for each in inherited[:1]]
    print(opened.read(), "released", flush=True)
    inherited[1].send(b"kept")
    sys.stdin.read()
"""


def test_a_forked_process_that_outlives_its_server_does_not_hold_the_servers_port() -> None:
    """The engine of a killed server did, and the server that was started again found its port taken."""
    listening, (ours, theirs) = listen("127.0.0.1", 0), socket.socketpair()
    port, numbers = listening.getsockname()[1], [listening.fileno(), theirs.fileno()]
    command = [sys.executable, "-c", RELEASES, *map(str, numbers)]
    with (
        ours,
        subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine,
    ):
        listening.close()
        theirs.close()
        assert engine.stdout is not None
        assert engine.stdout.readline().strip() == b"released"
        assert ours.recv(4) == b"kept", "other sockets stay"
        listen("127.0.0.1", port).close()
        engine.communicate()
    assert engine.returncode == 0


def test_orphans_are_adopted_inside_the_block_alone() -> None:
    leaves_an_orphan = "import os, time; os.fork() or time.sleep(5)"

    def adopted() -> set[psutil.Process]:
        before = set(psutil.Process().children())
        subprocess.run([sys.executable, "-c", leaves_an_orphan], check=True)
        return set(psutil.Process().children()) - before

    with adopting_orphans():
        (orphan,) = adopted()
        orphan.kill()
        orphan.wait()
    assert adopted() == set()
