"""The broker as a process: its command line, how it starts and ends, and that a kill costs nothing."""

import itertools
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from atropos_api.client import BrokerClient
from atropos_api.errors import PortInUse
from atropos_api.server import serve
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, RunRequest
from example_trainer.processes.ports import free_port

COMMAND = [sys.executable, "-m", "atropos_api"]


def start(port, store, *options):
    process = subprocess.Popen([*COMMAND, "--port", str(port), "--store", str(store), *options], stderr=subprocess.PIPE)
    with BrokerClient(f"http://127.0.0.1:{port}") as client:
        client.wait_until_ready(30)
    return process


def stop(process, number=signal.SIGKILL):
    process.send_signal(number)
    _, errors = process.communicate(timeout=15)
    return errors.decode()


def refuse(*options):
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_help_imports_no_server():
    code = "import sys; from atropos_api.cli import run; run(sys.argv[1:])"
    program = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit:\n    print('fastapi' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    assert "--max-staleness" in result.stdout
    assert result.stdout.endswith("False\n")


def test_a_port_that_is_taken_names_its_holder_and_the_flag():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = refuse("--port", str(port), "--store", "memory")
    assert f"pid {psutil.Process().pid}" in line
    assert "--port" in line


def test_a_port_on_which_another_program_listens_first_is_taken_too(monkeypatch):
    """Two programs may bind a port on which none listens yet; the second that listens got a traceback."""
    bind_socket = socket.socket.bind
    with socket.socket() as rival:

        def lose(listener, address):
            bind_socket(listener, address)
            rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bind_socket(rival, listener.getsockname())
            rival.listen()

        monkeypatch.setattr(socket.socket, "bind", lose)
        with pytest.raises(PortInUse, match="is taken"):
            serve.bind("127.0.0.1", 0)


def test_the_holder_of_a_port_is_named_without_its_arguments_which_may_be_secrets():
    port, token = free_port(), "a-secret-of-the-first"
    process = start(port, "memory", "--token", token)
    try:
        line = refuse("--port", str(port), "--store", "memory")
    finally:
        stop(process)
    assert f"by pid {process.pid} (" in line
    assert "-m atropos_api)" in line
    assert token not in line


def test_a_place_that_cannot_hold_a_store_is_one_line():
    assert "--store /dev/null: it is not a directory" in refuse("--port", "0", "--store", "/dev/null")


@pytest.mark.parametrize("step", ["no-such-step", "batch-kept:often"])
def test_a_crash_point_that_is_set_is_never_silent(step, monkeypatch):
    monkeypatch.setenv("ATROPOS_CRASH_AT", step)
    assert f"ATROPOS_CRASH_AT={step}" in refuse("--port", "0", "--store", "memory")
    monkeypatch.setenv("ATROPOS_CRASH_AT", "batch-kept:1000")
    if step == "no-such-step":
        assert "ATROPOS_CRASH_AT is set" in stop(start(free_port(), "memory"), signal.SIGTERM)


def test_misspelt_flags_are_refused_in_one_line():
    assert "did you mean --max-staleness" in refuse("--max-stalenes", "3")


def test_a_directory_in_use_is_refused(tmp_path):
    process = start(free_port(), tmp_path)
    try:
        assert f"in use by another broker (pid {process.pid})" in refuse("--port", "0", "--store", str(tmp_path))
    finally:
        stop(process)


def test_it_says_at_start_what_it_found(tmp_path):
    port = free_port()
    process = start(port, tmp_path)
    with BrokerClient(f"http://127.0.0.1:{port}") as client:
        client.begin_run(RunRequest(name="mine", batch_size=8, max_token_length=9, num_steps=3))
        request = EnvironmentRequest(name="env", group_size=4, max_token_length=9)
        environment = client.register_environment(request).environment_id
        client.submit(environment, [make_group(4)], idempotency_key="k")
    stop(process)
    errors = stop(start(port, tmp_path), signal.SIGTERM)
    assert "run mine" in errors
    assert "1 groups queued, the oldest" in errors
    assert "0 groups queued" in stop(start(port, tmp_path, "--fresh"), signal.SIGTERM)


def test_a_wide_address_makes_up_a_token_and_asks_for_it():
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, "--host", "0.0.0.0", "--port", str(port), "--store", "memory"], stderr=subprocess.PIPE
    )
    with BrokerClient(f"http://127.0.0.1:{port}") as client:
        client.wait_until_ready(30)
    assert httpx.get(f"http://127.0.0.1:{port}/status").status_code == 401
    assert "--token" in stop(process, signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_even_if_callers_wait(number):
    port = free_port()
    process = start(port, "memory")
    with BrokerClient(f"http://127.0.0.1:{port}", retry_seconds=0.0) as client:
        run = client.begin_run(RunRequest(name="r", batch_size=8, max_token_length=9, num_steps=3))
        found = []

        def wait():
            found.append(client.get_batch(1, run_id=run.run_id, epoch=run.epoch, wait_seconds=30))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        waiting.join(timeout=5)
    assert time.monotonic() - started < 4
    assert found == [None]
    process.stderr.close()


def test_an_idle_broker_uses_no_cpu(tmp_path):
    process = start(free_port(), tmp_path)
    measured = psutil.Process(process.pid)
    before = sum(measured.cpu_times()[:2])
    time.sleep(2)
    assert sum(measured.cpu_times()[:2]) - before <= 0.05
    stop(process)


class Producers:
    """Environments that keep submitting, each group under a key, whatever happens to the broker."""

    def __init__(self, url, count):
        self.acknowledged = set()
        self._idents = itertools.count(1)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(url, n)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, url, number):
        with BrokerClient(url, retry_seconds=60) as client:
            request = EnvironmentRequest(name=f"env {number}", group_size=4, max_token_length=9)
            environment = client.register_environment(request).environment_id
            while not self._stopping.is_set():
                with self._lock:
                    ident = next(self._idents)
                group = make_group(random.choice([2, 4]), 4, first_token=ident * 100)
                client.submit(environment, [group], idempotency_key=f"key {ident}")
                with self._lock:
                    self.acknowledged.add(ident)

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=70)


class Trainer:
    """Takes numbered batches and commits them; a number that is requested twice must have the same groups."""

    def __init__(self, url):
        self.batches = {}
        self.number = 1
        self._client = BrokerClient(url, retry_seconds=60)
        self.run = self._client.begin_run(RunRequest(name="run", batch_size=16, max_token_length=9, num_steps=0))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self):
        while not self._stopping.is_set():
            self.step(wait_seconds=1.0)

    def step(self, wait_seconds):
        for _ in range(2):
            batch = self._client.get_batch(
                self.number, run_id=self.run.run_id, epoch=self.run.epoch, wait_seconds=wait_seconds
            )
            if batch is None:
                return False
            idents = [group.tokens[0][0] // 100 for group in batch.groups]
            assert self.batches.setdefault(self.number, idents) == idents
        self._client.commit(self.number, run_id=self.run.run_id, epoch=self.run.epoch)
        self.number += 1
        return True

    def stop(self):
        self._stopping.set()
        self._thread.join(timeout=70)
        while self.step(wait_seconds=0.0):
            pass
        left = self._client.status()["queue"]["groups"]
        self._client.close()
        return left


def test_killed_under_load_of_our_clients_it_loses_nothing_acknowledged_and_duplicates_nothing(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start(port, tmp_path)
    trainer, producers = Trainer(url), Producers(url, 3)
    for _ in range(2):
        time.sleep(random.uniform(0.2, 0.8))
        stop(process)
        process = start(port, tmp_path)
    time.sleep(0.3)
    producers.stop()
    left = trainer.stop()
    delivered = [ident for idents in trainer.batches.values() for ident in idents]
    assert len(delivered) == len(set(delivered))
    assert len(delivered) + left == len(producers.acknowledged)
    assert set(delivered) <= producers.acknowledged
    assert trainer.number > 2
    stop(process, signal.SIGTERM)
