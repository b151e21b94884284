"""A broker that is killed again and again while honest clients use it, and the checks for afterwards.

Brokers are forked from one process that has imported everything, so that a restart costs milliseconds.
"""

import collections
import json
import os
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

from atropos_api.store.failpoints import CRASH_VARIABLE

PATIENCE = float(os.environ.get("ATROPOS_KILLS_PATIENCE", "1"))
"""Factor on every time limit, for machines that are overloaded."""

NURSERY = """
import json, os, signal, sys
from atropos_api.store.segments import SegmentLog
import atropos_api.server.serve
from atropos_api.cli import run

# Small segments, so that they are sealed, compacted and deleted all the time.
SegmentLog.__init__.__kwdefaults__["segment_bytes"] = 30_000
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    wanted = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.stdin.close()
        os.environ.update(wanted["environment"])
        log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            os._exit(run(wanted["arguments"]))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(3)
    print(pid, flush=True)
"""


class Nursery:
    """Forks brokers, each with a port of its own that its restarts keep."""

    def __init__(self, log):
        self.log = log
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fork(self, *arguments, crash_at=""):
        wanted = {"arguments": arguments, "environment": {CRASH_VARIABLE: crash_at}, "log": str(self.log)}
        with self._lock:
            self._process.stdin.write(json.dumps(wanted) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=10 * PATIENCE)
        self._process.stdout.close()


class KilledBroker:
    """A broker that is started again at the same address after each kill."""

    def __init__(self, nursery, *options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._nursery = nursery
        self._options = options
        self.pid = None

    def start(self, crash_at=""):
        self.pid = self._nursery.fork("--port", str(self.port), *self._options, crash_at=crash_at)

    def wait_until(self, *statuses, path="/readyz", seconds=20):
        """Wait for one of these answers; return False if the broker was killed before."""
        deadline = time.monotonic() + seconds * PATIENCE
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + path, timeout=5 * PATIENCE).status_code in statuses:
                    return True
            except httpx.TransportError:
                if not self.alive():
                    return False
            time.sleep(0.02)
        pytest.fail(f"{path} did not answer {statuses} within {seconds} s; {self._nursery.log.read_text()[-2000:]}")

    def alive(self):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def wait_for_death(self, seconds):
        return self._wait_for(lambda: not self.alive(), seconds)

    def wait_for_stop(self, seconds):
        """Wait until the process is stopped, as by SIGSTOP."""
        process = psutil.Process(self.pid)
        return self._wait_for(lambda: process.status() == psutil.STATUS_STOPPED, seconds)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def _wait_for(self, holds, seconds):
        deadline = time.monotonic() + seconds * PATIENCE
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.01)
        return holds()

    def kill(self, number=signal.SIGKILL):
        if self.pid is not None and self.alive():
            os.kill(self.pid, number)
            assert self.wait_for_death(15)


class HonestClient:
    """Repeats a call, unchanged, until the active broker answers it."""

    def __init__(self, urls, patience_seconds):
        self._urls = list(urls)
        self._patience_seconds = patience_seconds * PATIENCE
        self._http = httpx.Client(timeout=3 * PATIENCE)

    def call(self, method, path, **options):
        deadline = time.monotonic() + self._patience_seconds
        seen = "no answer"
        while time.monotonic() < deadline:
            try:
                response = self._http.request(method, self._urls[0] + path, **options)
                if response.status_code < 300:
                    return response
                assert response.status_code == 503, (method, path, response.status_code, response.text, str(self._urls))
                seen = response.text
            except httpx.TransportError as error:
                seen = repr(error)
            self._urls.append(self._urls.pop(0))
            time.sleep(0.02)
        pytest.fail(f"{method} {path} got nowhere in {self._patience_seconds} s, the broker is wedged: {seen}")

    def close(self):
        self._http.close()


def make_body(ident, size):
    tokens = [[ident, row, 3] for row in range(size)]
    return {"tokens": tokens, "masks": tokens, "scores": [0.5] * size, "inference_logprobs": [[1.0, -0.5, -0.5]] * size}


class Worker:
    """A thread whose failure fails the test."""

    def __init__(self, work):
        self.failure = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self._work()
        except BaseException as error:
            self.failure = error

    def join(self):
        self._thread.join(timeout=90 * PATIENCE)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


class Load:
    """Environments that submit (the last one without keys, by the Atropos contract), and a trainer of two ranks."""

    BATCH_SIZE = 16

    def __init__(self, urls, environments=3, patience_seconds=30):
        self.acknowledged = set()
        self.slices = {}
        self.number = 1
        self._urls, self._patience_seconds = urls, patience_seconds
        self._lock = threading.Lock()
        self._ident = 0
        self._stopping = threading.Event()
        self._restart = threading.Event()
        self._restart.set()
        self._clients = []
        self.run = None
        self._trainer = self.connect()
        self._workers = [Worker(self._train)]
        self._workers += [Worker(lambda n=n: self._produce(n, environments)) for n in range(environments)]

    def connect(self):
        client = HonestClient(self._urls, self._patience_seconds)
        self._clients.append(client)
        return client

    def check(self):
        for worker in self._workers:
            if worker.failure is not None:
                raise worker.failure

    def _next_ident(self):
        with self._lock:
            self._ident += 1
            return self._ident

    def _produce(self, number, environments):
        client = self.connect()
        request = {"name": f"env {number}", "group_size": 2, "max_token_length": 9}
        environment = client.call("POST", "/v1/environments", json=request).json()["environment_id"]
        legacy = number == environments - 1
        if number == 0:
            # An odd size, so never in a batch of even ones: this group outlives all others of its segment.
            self._submit(client, environment, 3, legacy=False)
        while not self._stopping.is_set():
            self._submit(client, environment, random.choice([2, 4]), legacy=legacy)
            time.sleep(random.uniform(0, 0.01))

    def _submit(self, client, environment, size, *, legacy):
        ident = self._next_ident()
        group = make_body(ident, size)
        if legacy:
            # Without a key an unread answer counts as one that arrived, so the test waits for it.
            client.call("POST", "/scored_data", json=group | {"env_id": environment}, timeout=20 * PATIENCE)
        else:
            body = {"environment_id": environment, "groups": [group]}
            client.call("POST", "/v1/groups", json=body, headers={"Idempotency-Key": f"key {ident}"})
        with self._lock:
            self.acknowledged.add(ident)

    def begin(self, batch_size, point):
        body = {"name": "run", "batch_size": batch_size, "max_token_length": 9, "num_steps": 0}
        body |= {"resume": True, "resume_from_batch": point}
        self.run = self._trainer.call("POST", "/v1/runs", json=body).json()

    def restart_trainer(self):
        """Restart the trainer from its checkpoint, so that it begins its run again."""
        self._restart.set()

    def wait_for_batches(self, count, seconds=20):
        wanted = self.number + count
        deadline = time.monotonic() + seconds * PATIENCE
        while self.number < wanted:
            self.check()
            assert time.monotonic() < deadline, "no batch came"
            time.sleep(0.01)

    def _train(self):
        while not self._stopping.is_set():
            if self._restart.is_set():
                self._restart.clear()
                self.begin(self.BATCH_SIZE, self.number - 1)
            self.step(wait_seconds=1)

    def step(self, wait_seconds):
        """Let both ranks fetch their slices, sometimes twice; every repeat must return the first answer."""
        for rank in (0, 1, *random.choice([(), (0, 1)])):
            query = {"run_id": self.run["run_id"], "epoch": self.run["epoch"], "wait": wait_seconds}
            query |= {"rank": rank, "world_size": 2}
            response = self._trainer.call("GET", f"/v1/batches/{self.number}", params=query)
            if response.status_code == 204:
                return False
            assert self.slices.setdefault((self.number, rank), response.content) == response.content
        body = {"run_id": self.run["run_id"], "epoch": self.run["epoch"]}
        self._trainer.call("POST", f"/v1/batches/{self.number}/commit", json=body)
        self.number += 1
        return True

    def finish(self):
        """Stop, train all groups that are left, and compare the acknowledged ones with the delivered ones."""
        self._stopping.set()
        for worker in self._workers:
            worker.join()
        self.begin(4, self.number - 1)
        while self.step(wait_seconds=0):
            pass
        status = self._trainer.call("GET", "/v1/status").json()
        for client in self._clients:
            client.close()
        groups = [group for body in self.slices.values() for group in json.loads(body)["groups"]]
        delivered = [group["tokens"][0][0] for group in groups]
        twice = [ident for ident, count in collections.Counter(delivered).items() if count > 1]
        assert not twice, f"delivered twice: {twice}"
        assert set(delivered) <= self.acknowledged, "a group that nobody sent was delivered"
        left = status["queue"]["groups"]
        assert left <= 2
        assert len(delivered) + left == len(self.acknowledged), f"lost: {self.acknowledged - set(delivered)}, {left=}"
        return status


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("nursery") / "brokers.log")
    yield made
    made.close()


@pytest.fixture
def killed_broker(nursery):
    """Creates brokers that are killed at the end of the test in any case."""
    made = []

    def make(*options):
        made.append(KilledBroker(nursery, *options))
        return made[-1]

    yield make
    for broker in made:
        broker.kill()


@pytest.fixture
def load():
    """Creates load, which is stopped at the end of the test in any case."""
    made = []

    def make(*brokers, **options):
        made.append(Load([broker.url for broker in brokers], **options))
        return made[-1]

    yield make
    for one in made:
        one._stopping.set()
