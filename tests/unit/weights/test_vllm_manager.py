"""The server as the trainer's child: it is ready once it serves the version; stopping ends its processes only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from example_trainer.errors import ServerExited, WaitTimedOut
from example_trainer.vllm_manager import VllmManager, VllmOptions

# It answers like the server, has a worker process of its own and a file in shared memory, and ends at SIGTERM.
STAND_IN = textwrap.dedent(
    """
    import argparse, json, mmap, os, socket, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--policy-version", type=int)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--needs-key", action="store_true")
    arguments, _ = parser.parse_known_args()
    print("starting", *sys.argv[1:], flush=True)
    if arguments.fail:
        print("RuntimeError: no such model", flush=True)
        sys.exit(3)
    if arguments.stubborn:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path = f"/dev/shm/stand-in-{os.getpid()}"
    with open(path, "wb+") as file:
        file.write(bytes(4096)); file.flush()
        mapping = mmap.mmap(file.fileno(), 4096)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            info = {"policy_version": arguments.policy_version, "boot_id": "b", "model": "m", "max_model_len": 64}
            body = json.dumps({} if self.path == "/health" else info).encode()
            shown = self.headers["Authorization"] == "Bearer " + os.environ["ATROPOS_BRIDGE_TOKEN"]
            is_open = shown or self.path == "/health" or not arguments.needs_key
            self.send_response(200 if is_open else 401)
            self.send_header("Content-Length", str(len(body))); self.end_headers()
            self.wfile.write(body)
        def log_message(self, *_): pass

    numbers = dict(entry.split("=") for entry in os.environ["ATROPOS_SERVER_SOCKETS"].split(","))
    server = HTTPServer(("127.0.0.1", arguments.port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(numbers["listening"]))
    socket.socket(fileno=int(numbers["loaded"])).send(b"1")
    server.serve_forever()
    """
)


@pytest.fixture
def manager(tmp_path):
    """A function that makes a manager of stand-in servers."""
    made = []
    script = tmp_path / "stand_in_vllm_server.py"
    script.write_text(STAND_IN)

    def make(**settings):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = VllmOptions(
            port=port,
            log_path=tmp_path / "logs" / "vllm.log",
            model_name="name",
            settings=settings,
            ready_timeout_seconds=20.0,
            program=(sys.executable, str(script)),
        )
        made.append(VllmManager(options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def tree_of(pid):
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def gone(processes):
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def test_ready_means_serving_the_version_it_was_started_for(manager):
    vllm = manager()
    vllm.start("/some/model", version=7)
    assert vllm.wait_until_ready(7).policy_version == 7
    assert vllm.running


def test_a_server_with_an_api_key_is_seen_to_be_ready(manager):
    """With $VLLM_API_KEY it tells its version to nobody without a key: the trainer waited to the end of its limit."""
    vllm = manager(needs_key=True)
    vllm.start("/some/model", version=7)
    assert vllm.wait_until_ready(7).policy_version == 7


def test_a_server_of_another_version_on_the_port_is_not_taken_for_ours(manager):
    vllm = manager()
    vllm.start("/some/model", version=7)
    vllm.wait_until_ready(7)
    vllm._options = replace(vllm._options, ready_timeout_seconds=0.2)
    with pytest.raises(WaitTimedOut, match="serves version 7"):
        vllm.wait_until_ready(8)


def test_stopping_ends_the_whole_tree_and_sweeps_its_shared_memory(manager):
    vllm = manager()
    vllm.start("m", version=1)
    vllm.wait_until_ready(1)
    tree, shared = tree_of(vllm.pid), Path(f"/dev/shm/stand-in-{vllm.pid}")
    assert len(tree) == 2
    assert shared.exists()
    started = time.monotonic()
    vllm.stop()
    assert time.monotonic() - started < 8
    assert gone(tree)
    assert not shared.exists()


def test_a_server_that_ignores_the_request_to_end_is_killed_after_the_grace(manager):
    vllm = manager(stubborn=True)
    vllm.start("m", version=1)
    vllm.wait_until_ready(1)
    tree = tree_of(vllm.pid)
    vllm.stop(grace_seconds=0.5)
    assert gone(tree)


def test_a_neighbour_with_the_same_program_survives(manager):
    ours, neighbour = manager(), manager()
    for vllm in (ours, neighbour):
        vllm.start("m", version=1)
        vllm.wait_until_ready(1)
    ours.stop()
    assert neighbour.running
    assert len(tree_of(neighbour.pid)) == 2


def test_orphans_of_a_killed_server_are_ended_too(manager):
    vllm = manager()
    vllm.start("m", version=1)
    vllm.wait_until_ready(1)
    tree = tree_of(vllm.pid)
    tree[0].send_signal(signal.SIGKILL)
    assert wait_until(lambda: not vllm.running)
    assert not gone(tree[1:])
    shared = Path(f"/dev/shm/stand-in-{tree[0].pid}")
    assert shared.exists()
    vllm.stop()
    assert gone(tree)
    assert not shared.exists()


def test_a_failed_start_shows_the_end_of_the_log(manager):
    vllm = manager(fail=True)
    vllm.start("m", version=1)
    with pytest.raises(ServerExited, match="exit code 3") as caught:
        vllm.wait_until_ready(1)
    assert "RuntimeError: no such model" in str(caught.value)


def test_a_restart_serves_the_next_version_on_the_same_port(manager):
    vllm = manager()
    for version in (1, 2):
        vllm.stop()
        vllm.start("m", version=version)
        assert vllm.wait_until_ready(version).policy_version == version


def test_the_command_names_model_version_and_client_facing_name(manager):
    command = " ".join(manager().command("/weights/policy-v3", version=3))
    for part in ("--model /weights/policy-v3", "--policy-version 3", "--served-model-name name", "--no-share-weights"):
        assert part in command


def test_the_server_dies_with_the_process_that_started_it_even_by_sigkill(manager, tmp_path):
    port = manager()._options.port
    starter = tmp_path / "starter.py"
    starter.write_text(
        textwrap.dedent(
            f"""
            import sys, threading, time
            from pathlib import Path
            from example_trainer.vllm_manager import VllmManager, VllmOptions
            folder = Path({str(tmp_path)!r})
            program = (sys.executable, str(folder / "stand_in_vllm_server.py"))
            options = dict(model_name="n", log_path=folder / "x.log", program=program)
            vllm = VllmManager(VllmOptions(port={port}, **options))
            background = threading.Thread(target=vllm.start, args=("m",), kwargs={{"version": 1}})
            background.start(); background.join()  # the thread that asked for it may end
            vllm.wait_until_ready(1)
            print(vllm.pid, flush=True)
            time.sleep(600)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, str(starter)], stdout=subprocess.PIPE, text=True, env=environment)
    server = psutil.Process(int(parent.stdout.readline()))
    worker = server.children()
    try:
        time.sleep(0.3)
        assert server.is_running()
        parent.kill()
        parent.wait()
        assert wait_until(lambda: gone([server]))
    finally:
        for process in [*worker, parent]:
            process.kill()
        parent.stdout.close()
        Path(f"/dev/shm/stand-in-{server.pid}").unlink(missing_ok=True)
