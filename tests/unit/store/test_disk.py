"""Disk space is freed by commits and compaction, and its lack is reported instead of a crash."""

import os

import httpx
import msgspec
import pytest

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.config import BrokerConfig
from atropos_api.errors import StoreUnavailable
from atropos_api.server.app import create_app
from atropos_api.store.directory import open_directory
from atropos_api.store.segments import SegmentLog
from atropos_api.store.sqlite_ledger import SqliteLedger
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.group_json import check_group, decode_fields


@pytest.fixture
def store(tmp_path):
    ledger, bodies = open_directory(tmp_path, fsync="never", fresh=False)
    yield ledger, bodies
    bodies.close()
    ledger.close()


def checked(ident, size=4, **fields):
    group = make_group(size, 4, first_token=ident * 100, **fields)
    return check_group(decode_fields(msgspec.json.encode(group)), env_id=0)


def begin(broker, name="run", **options):
    defaults = {"batch_size": 4, "max_token_length": 9, "num_steps": 0, "take_over": True}
    return broker.begin_run(RunRequest(name=name, **(defaults | options)))


def with_environment(broker):
    request = EnvironmentRequest(name="env", group_size=4, max_token_length=9)
    return broker.register_environment(request).environment_id


def test_committed_bodies_leave_the_disk(store):
    store[1]._segment_bytes = 2000
    broker = Broker(*store)
    environment = with_environment(broker)
    begin(broker)
    for number in range(1, 40):
        broker.submit(environment, [checked(number)])
        broker.get_batch(number)
        broker.commit(number)
    assert store[1].size_bytes() < 5000


def test_one_group_that_stays_does_not_keep_a_segment_alive(store):
    store[1]._segment_bytes = 20_000
    broker = Broker(*store)
    environment = with_environment(broker)
    broker.submit(environment, [checked(7, 3)])
    begin(broker)
    for number in range(1, 60):
        broker.submit(environment, [checked(number)])
        broker.get_batch(number)
        broker.commit(number)
    assert store[1].size_bytes() < 25_000
    (stuck,) = [row for lane in broker.state.queue.lanes for row in lane]
    assert broker.read_bodies([stuck])[0].startswith(b'{"tokens":[[700')
    # The new place is in the ledger too.
    assert Broker(*store).state.queue.oldest().body == stuck.body


def test_left_over_groups_go_when_they_take_too_much(store, monkeypatch):
    monkeypatch.setattr(BrokerSettings, "max_left_over_bytes", 3000)
    broker = Broker(*store)
    environment = with_environment(broker)
    for run in range(6):
        begin(broker, f"run {run}")
        broker.submit(environment, [checked(n) for n in range(3)])
    begin(broker, "last")
    kept = sum(len(rows) for rows in broker.state.left_over.values())
    assert 3 <= kept < 18
    assert len(store[0].load().groups) == kept


def test_committed_batches_are_kept_for_replay_and_come_back_on_resume(store):
    broker = Broker(*store, settings=BrokerSettings(keep_batches=2))
    environment = with_environment(broker)
    begin(broker)
    for number in range(1, 5):
        broker.submit(environment, [checked(number)])
        broker.get_batch(number)
        broker.commit(number)
    assert begin(broker, resume=True, resume_from_batch=2).next_batch == 3
    found = [broker.read_bodies(broker.get_batch(number))[0][:14] for number in (3, 4)]
    assert found == [b'{"tokens":[[30', b'{"tokens":[[40']


def make_disk_full(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", refuse)


@pytest.mark.anyio
async def test_a_full_disk_is_a_503_until_there_is_room_again(store, monkeypatch):
    broker = Broker(*store)
    with_environment(broker)
    app = create_app(BrokerConfig(store="memory"), broker)
    body = msgspec.json.encode({"environment_id": 0, "groups": [make_group(4)]})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        with monkeypatch.context() as patch:
            make_disk_full(patch)
            response = await http.post("/v1/groups", content=body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["type"].endswith("store-unavailable")
            assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.post("/v1/groups", content=body)).status_code == 202
    assert broker.state.queue.groups == 1


@pytest.mark.anyio
async def test_a_disk_with_room_for_small_groups_alone_is_not_ready(store, monkeypatch):
    """A nearly full disk refuses a large group, but would take the few bytes of a simple probe."""
    broker = Broker(*store)
    with_environment(broker)
    app = create_app(BrokerConfig(store="memory"), broker)
    small, large = (
        msgspec.json.encode({"environment_id": 0, "groups": [make_group(4, length)]}) for length in (4, 4000)
    )
    write = os.writev

    def refuse_much(descriptor, pieces):
        if sum(map(len, pieces)) > 20_000:
            raise OSError(28, "No space left on device")
        return write(descriptor, pieces)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", refuse_much)
            assert (await http.post("/v1/groups", content=large)).status_code == 503
            assert (await http.post("/v1/groups", content=small)).status_code == 202
            for _ in range(2):
                assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.post("/v1/groups", content=large)).status_code == 202


def refuse_writes(ledger, statement, values=(), execute=SqliteLedger._execute):
    """Stand in for `SqliteLedger._execute` on a full disk, where a transaction cannot be stored."""
    begins, inside = statement == "BEGIN IMMEDIATE", ledger._db.in_transaction
    if statement == "COMMIT" or not (begins or inside):
        raise StoreUnavailable("no room")
    execute(ledger, statement, values)


@pytest.mark.anyio
async def test_a_change_the_ledger_refused_is_not_remembered(store, monkeypatch):
    broker = Broker(*store)
    environment = with_environment(broker)
    begin(broker)
    broker.submit(environment, [checked(1)])
    app = create_app(BrokerConfig(store="memory"), broker)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLedger, "_execute", refuse_writes)
            assert (await http.get("/v1/batches/1")).status_code == 503
        assert broker.state.runs.open.formed_batch == 0
        assert (await http.get("/v1/batches/1")).status_code == 200


def test_an_environment_is_not_believed_to_have_left_or_returned_before_that_is_written(store, monkeypatch):
    broker = Broker(*store)
    row = broker.state.environments.get(with_environment(broker))
    for change, connected in ((lambda: broker.disconnect_environment(0), True), (lambda: broker.touch(row), False)):
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLedger, "_execute", refuse_writes)
            with pytest.raises(StoreUnavailable):
                change()
        assert (row.connected, row.environment_id in broker.state.liveness().alive_ids) == (connected, connected)
        change()
        assert row.connected is not connected


def test_a_log_without_its_directory_entry_is_begun_anew(tmp_path):
    log = SegmentLog(tmp_path / "new")
    log.append([b"x"])
    log.sync()
    log.close()
    assert len(list((tmp_path / "new").iterdir())) == 1
