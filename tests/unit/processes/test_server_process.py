"""A server is ended with all that it has started, and no process of others with it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from example_trainer.processes.child import ServerProcess
from example_trainer.processes.cleanup import SharedMemoryLedger
from example_trainer.processes.ports import HandoverChannel
from example_trainer.processes.tree import is_alive, wait_until

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def server_of(process: Any, tmp_path: Path) -> ServerProcess:
    loaded, told = socket.socketpair()
    told.close()
    return ServerProcess(process, SharedMemoryLedger(tmp_path), HandoverChannel(), loaded)


def test_what_a_server_has_left_is_ended_with_it(tmp_path: Path) -> None:
    command = f"import subprocess; subprocess.Popen({SLEEP})"
    process = subprocess.Popen((sys.executable, "-c", command), start_new_session=True)
    process.wait()
    server = server_of(process, tmp_path)
    (left,) = server.members()
    server.stop(grace_seconds=0)
    assert not is_alive(left)
    assert server.members() == []


def test_a_server_that_has_ended_by_itself_ends_no_process_that_has_its_number_by_now(tmp_path: Path) -> None:
    other = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        server = server_of(SimpleNamespace(pid=other.pid, poll=lambda: 1, wait=lambda timeout: timeout), tmp_path)
        assert server.members() == []
        server.stop(grace_seconds=0)
        assert not wait_until(lambda: other.poll() is not None, 0.2)
    finally:
        other.kill()
        other.wait()
