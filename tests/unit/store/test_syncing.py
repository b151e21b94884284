"""Each `--fsync` setting keeps its promise: a power failure between any two steps loses no more than it allows."""

import asyncio
import os
import random
import shutil
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from atropos_api.broker import Broker
from atropos_api.config import BrokerConfig
from atropos_api.errors import StoreUnavailable
from atropos_api.server.app import create_app
from atropos_api.store import directory
from atropos_api.store.directory import open_directory
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.group_json import check_group, decode_fields


class Disk:
    """Records the sizes that files had when they were synced to the disk."""

    def __init__(self, monkeypatch, *, delay=0.0):
        self.sizes = {}
        self.calls = 0
        self._real = os.fdatasync
        self._delay = delay
        monkeypatch.setattr(os, "fdatasync", self.sync)
        monkeypatch.setattr(os, "fsync", self.sync)

    def sync(self, descriptor):
        size = os.fstat(descriptor).st_size
        self.calls += 1
        time.sleep(self._delay)
        self._real(descriptor)
        self.sizes[str(Path(f"/proc/self/fd/{descriptor}").readlink())] = size

    def cut_power(self, source, target, *, keep):
        """Copy the disk as after a power failure: only synced bytes remain, or with `keep` all of bodies or ledger."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        for path in [*source.glob("segments/*.log"), source / "ledger.sqlite-wal"]:
            kind = "bodies" if path.suffix == ".log" else "ledger"
            if path.exists() and kind != keep:
                os.truncate(target / path.relative_to(source), self.sizes.get(str(path), 0))


def checked(ident, size=4):
    body = msgspec.json.encode(make_group(size, 4, first_token=ident * 100))
    return check_group(decode_fields(body), env_id=0)


def register(broker):
    request = EnvironmentRequest(name="env", group_size=4, max_token_length=9)
    return broker.register_environment(request).environment_id


@pytest.mark.parametrize(("fsync", "most"), [("never", 0), ("interval", 8)])
def test_how_often_data_is_forced_to_the_disk(tmp_path, monkeypatch, fsync, most):
    disk = Disk(monkeypatch)
    ledger, bodies = open_directory(tmp_path, fsync=fsync, fresh=False)
    broker = Broker(ledger, bodies)
    register(broker)
    for ident in range(50):
        broker.submit(0, [checked(ident)])
    time.sleep(1.3 if fsync == "interval" else 0.1)
    # Syncs of the segment, its directory and the ledger, and at the start of the ledger's directory.
    assert disk.calls == (0 if fsync == "never" else 4)
    time.sleep(0.3)
    assert disk.calls <= 4
    bodies.close()
    ledger.close()
    assert disk.calls <= most


def test_an_orderly_stop_forces_the_last_second_to_the_disk_too(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    ledger, bodies = open_directory(tmp_path / "store", fsync="interval", fresh=False)
    broker = Broker(ledger, bodies)
    register(broker)
    for ident in range(3):
        broker.submit(0, [checked(ident)])
    broker.close()
    disk.cut_power(tmp_path / "store", tmp_path / "after", keep=None)
    ledger, bodies = open_directory(tmp_path / "after", fsync="interval", fresh=False)
    broker = Broker(ledger, bodies)
    assert broker.state.queue.groups == 3
    broker.close()


@pytest.mark.anyio
async def test_always_answers_only_what_is_on_the_disk_many_answers_at_a_time(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, delay=0.01)
    ledger, bodies = open_directory(tmp_path, fsync="always", fresh=False)
    broker = Broker(ledger, bodies)
    register(broker)
    app = create_app(BrokerConfig(store=str(tmp_path), fsync="always"), broker)
    segment = str(tmp_path / "segments" / "0000000001.log")
    places = {}

    async def submit(http, ident):
        body = msgspec.json.encode({"environment_id": 0, "groups": [make_group(4, 4, first_token=ident * 100)]})
        response = await http.post("/v1/groups", content=body, headers={"Idempotency-Key": str(ident)})
        assert response.status_code == 202
        key_id = broker.keys.find("env", str(ident)).key_id
        row = next(row for row in broker.state.queue.lanes[0] if row.key_id == key_id)
        places[ident] = row.body.offset + row.body.length
        assert disk.sizes[segment] >= places[ident]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        await asyncio.gather(*(submit(http, ident) for ident in range(60)))
    assert len(places) == 60
    # Each sync is of two files, so without sharing there would be 120 calls.
    assert disk.calls < 60
    bodies.close()
    ledger.close()


@pytest.mark.anyio
async def test_a_disk_that_fails_to_sync_is_a_503_and_a_repeat_adds_nothing(tmp_path, monkeypatch):
    ledger, bodies = open_directory(tmp_path, fsync="always", fresh=False)
    broker = Broker(ledger, bodies)
    register(broker)
    app = create_app(BrokerConfig(store=str(tmp_path), fsync="always"), broker)
    full = OSError(28, "No space left on device")
    legacy = msgspec.json.encode(make_group(4))
    keyed = msgspec.json.encode({"environment_id": 0, "groups": [make_group(4)]})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        for path, body, headers in (("/scored_data", legacy, {}), ("/v1/groups", keyed, {"Idempotency-Key": "k"})):
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(full))
                response = await http.post(path, content=body, headers=headers)
                assert (response.status_code, response.headers["retry-after"]) == (503, "1")
                assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/readyz")).status_code == 200
            assert (await http.post(path, content=body, headers=headers)).status_code in {200, 202}
    assert broker.state.queue.groups == 2
    bodies.close()
    ledger.close()


def test_a_sync_forces_bodies_and_ledger_to_the_disk(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    broker = Broker(*open_directory(tmp_path, fsync="always", fresh=False))
    register(broker)
    broker.begin_run(RunRequest(name="run", batch_size=8, max_token_length=9, num_steps=0))
    broker.submit(0, [checked(1)], key="k")
    broker.sync()
    written = [tmp_path / "ledger.sqlite-wal", *tmp_path.glob("segments/*.log")]
    sizes = {str(path): size for path in written if (size := path.stat().st_size)}
    assert len(sizes) == 2
    assert {path: disk.sizes.get(path) for path in sizes} == sizes
    broker.close()


def test_after_a_failed_sync_that_room_does_not_explain_nothing_is_taken(tmp_path, monkeypatch):
    """The kernel may have dropped data that it could not write, and would report success for the next sync."""
    ledger, bodies = open_directory(tmp_path, fsync="always", fresh=False)
    broker = Broker(ledger, bodies)
    register(broker)
    broker.submit(0, [checked(1)], key="k")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StoreUnavailable, match="restart the broker"):
            broker.sync()
    with pytest.raises(StoreUnavailable, match="restart the broker"):
        broker.submit(0, [checked(2)], key="l")
    broker.close()
    broker = Broker(*open_directory(tmp_path, fsync="always", fresh=False))
    assert broker.submit(0, [checked(2)], key="l").accepted == 1
    broker.close()


class World:
    """An environment and a trainer on a broker that answers after a sync, until the power fails."""

    def __init__(self, directory, random_numbers):
        self.directory = directory
        self.random = random_numbers
        self.sent = self.committed = 0
        self.trained = []
        self.asked = {}
        self.open()
        register(self.broker)
        self.broker.sync()

    def open(self):
        ledger, bodies = open_directory(self.directory, fsync="always", fresh=False)
        bodies._segment_bytes = 2500
        self.broker = Broker(ledger, bodies)
        self.broker.begin_run(
            RunRequest(
                name="run", batch_size=8, max_token_length=9, num_steps=0, resume=True, resume_from_batch=self.committed
            )
        )

    def submit(self):
        self.broker.submit(0, [checked(self.sent + 1, self.random.choice([2, 4]))], key=f"key {self.sent + 1}")
        self.broker.sync()
        self.sent += 1

    def train(self):
        rows = self.broker.get_batch(self.committed + 1)
        if rows is None:
            return
        idents = [msgspec.json.decode(body)["tokens"][0][0] // 100 for body in self.broker.read_bodies(rows)]
        self.broker.sync()
        assert self.asked.setdefault(self.committed + 1, idents) == idents

    def commit(self):
        if self.committed + 1 in self.asked:
            # The checkpoint that covers it is written first, so a trainer that returns continues after it.
            self.committed += 1
            self.trained += self.asked[self.committed]
            self.broker.commit(self.committed)
            self.broker.sync()


@pytest.mark.parametrize("keep", ["nothing", "bodies", "ledger"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("ATROPOS_POWER_CUTS", "4"))))
def test_power_that_fails_anywhere_costs_always_nothing_that_was_answered(tmp_path, monkeypatch, seed, keep):
    disk = Disk(monkeypatch)
    world = World(tmp_path / "0", random.Random(f"{seed} {keep}"))
    for life in range(1, 4):
        for _ in range(world.random.randint(1, 40)):
            world.random.choice([world.submit, world.submit, world.submit, world.train, world.commit])()
        # A request in progress when the power fails is not answered; its caller asks again.
        with monkeypatch.context() as patch:
            patch.setattr(Broker, "sync", lambda _: (_ for _ in ()).throw(InterruptedError))
            for step in world.random.sample([world.submit, world.train, world.commit], 2):
                try:
                    step()
                except InterruptedError:
                    break
        disk.cut_power(world.directory, tmp_path / str(life), keep=keep)
        world.broker.close()
        world.directory = tmp_path / str(life)
        world.open()
        world.submit()
    while world.committed + 1 in world.asked or world.broker.get_batch(world.committed + 1):
        world.train()
        world.commit()
    left = [row.size for lane in world.broker.state.queue.lanes for row in lane]
    assert len(world.trained) == len(set(world.trained))
    assert len(world.trained) + len(left) == world.sent
    world.broker.close()


def test_a_store_that_is_closed_just_as_a_sync_becomes_due_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SYNC_INTERVAL_SECONDS", 0.01)
    ledger, _ = open_directory(tmp_path, fsync="interval", fresh=False)
    closing, clear, both_set = threading.Thread(target=ledger.close, daemon=True), ledger.written.clear, 0.05

    def clear_after_close_has_begun():
        if closing.ident is None:
            closing.start()
            time.sleep(both_set)
        clear()

    monkeypatch.setattr(ledger.written, "clear", clear_after_close_has_begun)
    ledger.probe()
    deadline = time.monotonic() + 10
    while closing.ident is None and time.monotonic() < deadline:
        time.sleep(both_set)
    closing.join(10)
    assert not closing.is_alive()
