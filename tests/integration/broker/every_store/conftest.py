"""A served broker over each store, with a clock that the test sets, and callers of both contracts and forms."""

import itertools
import time
from contextlib import ExitStack

import httpx
import pytest

from atropos_api.broker import Broker
from atropos_api.client import BrokerClient
from atropos_api.config import BrokerConfig
from atropos_api.server.app import create_app
from atropos_api.store.factory import open_store
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.testing import RedisServer, make_group, make_memory_app, running_redis, serve_in_thread
from atropos_api.wire import EnvironmentRequest, RunRequest

REGISTRATION = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 10,
}


class CurrentBroker:
    """The application of one server for all tests of the folder; it serves the running test's broker."""

    def __init__(self):
        self.app = make_memory_app()

    @property
    def context(self):
        return self.app.context

    @property
    def direct_calls(self):
        return self.app.direct_calls

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


class Scene:
    """A broker that can be restarted, and the actions of its callers."""

    def __init__(self, place, current, http, clients, **options):
        self._place, self._current = place, current
        self._config = BrokerConfig(store=place, **options)
        self._memory = (MemoryLedger(), MemoryBodyLog())
        self._keys = itertools.count()
        self.http, self.clients, self.client = http, clients, clients["columns"]
        self.now = 1_000_000.0
        self.start()

    def start(self):
        store = self._memory if self._place == "memory" else open_store(self._place, fsync="never")
        self.broker = Broker(*store, settings=self._config, clock=lambda: self.now)
        self._current.app = create_app(self._config, self.broker)

    def stop(self):
        if self._place != "memory":
            self.broker.close()

    def restart(self):
        self.stop()
        self.start()

    # A trainer and an environment of the Atropos contract

    def register(self, **changes):
        return self.http.post("/register", json=REGISTRATION | changes)

    def register_env(self, name="env", group_size=4, **changes):
        wanted = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": group_size}
        return self.http.post("/register-env", json=wanted | changes)

    def post(self, ident, size=4, env_id=None, **fields):
        tokens = [[ident, row] for row in range(size)]
        body = {"tokens": tokens, "masks": tokens, "scores": [float(row) for row in range(size)], "env_id": env_id}
        return self.http.post("/scored_data", json=body | fields).json()

    def poll(self):
        batch = self.http.get("/batch").json()["batch"]
        # A delivery is recorded after its answer is sent; a broker that is stopped at once would not record it.
        deadline = time.monotonic() + 10
        while batch and not self.broker.state.runs.require_open().delivered and time.monotonic() < deadline:
            time.sleep(0.001)
        return batch and [group["tokens"][0][0] for group in batch]

    # A trainer and an environment of v1

    def begin(self, name="run", form="columns", **options):
        defaults = {"batch_size": 8, "max_token_length": 64, "num_steps": 10}
        self.run = self.clients[form].begin_run(RunRequest(name=name, **(defaults | options)))
        return self.run

    def register_v1(self, name="env", group_size=4, **options):
        request = EnvironmentRequest(name=name, group_size=group_size, max_token_length=64, **options)
        return self.client.register_environment(request)

    def send(self, environment_id, *idents, size=4, form="columns", **fields):
        groups = [make_group(size, 2, first_token=ident * 1000, **fields) for ident in idents]
        return self.clients[form].submit(environment_id, groups, idempotency_key=f"key {next(self._keys)}")

    def get_batch(self, number, form="columns"):
        return self.clients[form].get_batch(number, run_id=self.run.run_id, epoch=self.run.epoch, wait_seconds=0)

    def batch(self, number, form="columns"):
        found = self.get_batch(number, form)
        return found and [group.tokens[0][0] // 1000 for group in found.groups]

    def open_run(self):
        run = self.client.status()["run"]
        return run["run_id"] if run is not None and run["state"] == "open" else None


@pytest.fixture(scope="session")
def redis_server():
    if not RedisServer.installed():
        pytest.skip("redis-server is not installed")
    with running_redis() as server:
        yield server


@pytest.fixture(scope="session")
def served():
    """The server of all tests, an HTTP client for the v0 calls, and a v1 client for each encoding."""
    current = CurrentBroker()
    with serve_in_thread(current) as url, ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=url, timeout=20))
        clients = {
            form: stack.enter_context(BrokerClient(url, retry_seconds=1.0, form=form)) for form in ("json", "columns")
        }
        yield current, http, clients


@pytest.fixture(params=["memory", "directory", "redis"])
def scene(request, served, tmp_path):
    place = request.param
    if place == "redis":
        server = request.getfixturevalue("redis_server")
        server.flush()
        place = server.url
    scene = Scene(str(tmp_path / "store") if place == "directory" else place, *served)
    yield scene
    scene.stop()
