"""Bodies that the disk damaged or lost are dropped, counted and shown, and block nothing else."""

import os

import httpx
import msgspec
import pytest

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.config import BrokerConfig
from atropos_api.errors import DamagedBatch, StoreUnavailable
from atropos_api.server.app import create_app
from atropos_api.store.directory import open_directory
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.group_json import check_group, decode_fields

RUN = RunRequest(name="run", batch_size=8, max_token_length=9, num_steps=0, resume=True)


class Stored:
    """A broker over a directory that can be opened again as after a kill."""

    def __init__(self, path):
        self.path = path
        self._open()
        request = EnvironmentRequest(name="env", group_size=4, max_token_length=9)
        self.environment = self.broker.register_environment(request).environment_id
        self.run = self.broker.begin_run(RUN)

    def _open(self):
        self.ledger, self.bodies = open_directory(self.path, fsync="never", fresh=False)
        self.broker = Broker(self.ledger, self.bodies, settings=BrokerSettings(keep_batches=1))

    def close(self):
        self.bodies.close()
        self.ledger.close()

    def reopen(self):
        self.close()
        self._open()

    def submit(self, *idents, key=None):
        groups = [make_group(4, 4, first_token=ident * 100) for ident in idents]
        checked = [check_group(decode_fields(msgspec.json.encode(group)), env_id=0) for group in groups]
        return self.broker.submit(self.environment, checked, key=key)

    def idents(self, number, rank=0, world_size=1):
        rows = self.broker.get_batch(number, rank=rank, world_size=world_size)
        if rows is None:
            return None
        return [msgspec.json.decode(body)["tokens"][0][0] // 100 for body in self.broker.read_bodies(rows)]

    def damage(self, seq):
        body = next(row.body for row in self.ledger.load().groups if row.seq == seq)
        path = self.path / "segments" / f"{body.segment:010d}.log"
        with path.open("r+b") as file:
            file.seek(body.offset + 5)
            file.write(b"\0\0\0")


@pytest.fixture
def stored(tmp_path):
    made = Stored(tmp_path)
    yield made
    made.close()


def test_a_batch_that_nobody_saw_is_formed_anew_without_the_damaged_group(stored):
    stored.submit(1, 2, 3)
    stored.damage(1)
    with pytest.raises(DamagedBatch, match="checksum"):
        stored.idents(1)
    assert stored.idents(1) == [2, 3]
    assert stored.broker.state.counters.groups_lost_total == 1
    assert stored.broker.state.events.after(0)[-2].type == "groups-lost"
    stored.reopen()
    assert stored.idents(1) == [2, 3]


def test_a_batch_that_nobody_saw_is_formed_anew_though_one_of_that_number_was_seen_in_the_run_before(stored):
    stored.submit(1, 2)
    stored.idents(1)
    stored.broker.begin_run(msgspec.structs.replace(RUN, name="next", take_over=True))
    stored.submit(3, 4, 5)
    stored.damage(3)
    with pytest.raises(DamagedBatch):
        stored.idents(1)
    assert stored.idents(1) == [4, 5]


def test_a_group_that_was_damaged_is_not_taken_back_as_trained_when_its_batch_is_replayed(stored):
    stored.submit(1, 2)
    stored.idents(1)
    stored.damage(2)
    with pytest.raises(DamagedBatch):
        stored.idents(1)
    stored.broker.commit(1)
    stored.broker.begin_run(RUN)
    assert stored.idents(1) == [1]
    stored.broker.commit(1)
    assert stored.broker.state.environments.get(stored.environment).outcomes.groups == {"trained": 1, "damaged": 1}


def test_a_batch_that_was_shown_keeps_its_other_groups_and_slices(stored):
    """R11: the same bytes each time, except for lost groups; a new batch would give some groups to two ranks."""
    stored.submit(1, 2, 3, 4)
    first = stored.idents(1, rank=0, world_size=2)
    others = stored.idents(1, rank=1, world_size=2)
    stored.damage(others[0])
    for again in range(2):
        if not again:
            with pytest.raises(DamagedBatch):
                stored.idents(1, rank=1, world_size=2)
        assert stored.idents(1, rank=0, world_size=2) == first
        assert stored.idents(1, rank=1, world_size=2) == []
        stored.reopen()
    stored.broker.commit(1)
    assert stored.idents(2) == [3, 4]


def test_a_batch_of_which_nothing_is_left_is_formed_anew(stored):
    stored.submit(1, 2, 3, 4)
    stored.idents(1)
    stored.idents(2)
    for seq in (1, 2):
        stored.damage(seq)
    with pytest.raises(DamagedBatch):
        stored.idents(1)
    assert stored.idents(1) is None
    stored.submit(5, 6)
    assert stored.idents(1) == [5, 6]
    assert stored.idents(2) == [3, 4]
    assert stored.idents(3) is None


def test_a_batch_that_is_replayed_to_a_resumed_trainer_is_formed_anew(stored):
    stored.submit(1, 2)
    stored.idents(1)
    stored.broker.commit(1)
    stored.damage(2)
    stored.broker.begin_run(RUN)
    with pytest.raises(DamagedBatch):
        stored.idents(1)
    stored.submit(3)
    assert stored.idents(1) == [1, 3]


def test_dissolving_a_batch_with_a_gap_forgets_the_gap(stored):
    stored.submit(1, 2, 3)
    stored.idents(1)
    stored.damage(2)
    with pytest.raises(DamagedBatch):
        stored.idents(1)
    stored.broker.begin_run(msgspec.structs.replace(RUN, batch_size=4))
    assert [stored.idents(number) for number in (1, 2, 3)] == [[1], [3], None]
    assert [row.seq for row in stored.ledger.load().groups] == [1, 3]


def test_a_segment_that_vanished_costs_its_groups_and_the_start_succeeds(stored):
    stored.submit(1, key="a")
    stored.reopen()
    stored.submit(2, key="b")
    stored.reopen()
    stored.submit(3, key="c")
    stored.close()
    (stored.path / "segments" / "0000000002.log").unlink()
    stored._open()
    assert stored.broker.state.queue.groups == 2
    assert stored.submit(2, key="b").accepted == 1
    assert stored.submit(3, key="c").duplicates == 1


def test_a_submission_cut_short_by_the_power_is_as_if_it_never_was(stored):
    """Its sender got no answer and repeats it whole: then nothing of it is missing or doubled."""
    stored.submit(1, key="whole")
    stored.submit(2, 3, key="cut short")
    stored.close()
    path = stored.path / "segments" / "0000000001.log"
    os.truncate(path, path.stat().st_size - 3)
    stored._open()
    assert stored.broker.state.queue.groups == 1
    assert stored.submit(1, key="whole").duplicates == 1
    assert stored.submit(2, 3, key="cut short").accepted == 2
    assert [stored.idents(1), stored.broker.state.queue.groups] == [[1, 2], 1]


def test_a_log_cut_anywhere_opens_with_what_lies_before_the_cut(stored):
    for ident in (1, 2):
        stored.submit(ident)
    stored.close()
    path = stored.path / "segments" / "0000000001.log"
    size = path.stat().st_size
    ledger = {path.name: path.read_bytes() for path in stored.path.glob("ledger*")}
    whole = path.read_bytes()
    for cut in [*range(0, size // 2 + 30, 7), *range(size - 15, size + 1)]:
        path.write_bytes(whole[:cut])
        for name, content in ledger.items():
            (stored.path / name).write_bytes(content)
        stored._open()
        assert stored.broker.state.queue.groups == (cut >= size // 2) + (cut == size)
        stored.close()
    stored._open()


def test_files_that_are_not_segments_are_left_alone(stored):
    stored.submit(1)
    for name in ("notes.log", "x.tmp"):
        (stored.path / "segments" / name).write_text("not ours")
    (stored.path / "segments" / "0000000009.log").write_bytes(b"ATR1\x05")
    stored.reopen()
    stored.submit(2)
    assert stored.idents(1) == [1, 2]
    assert (stored.path / "segments" / "notes.log").exists()
    assert not (stored.path / "segments" / "0000000009.log").exists()


def test_compaction_meets_damage_and_goes_on(stored):
    stored.bodies._segment_bytes = 3000
    stored.submit(1)
    for number in range(1, 9):
        stored.submit(number * 2, number * 2 + 1)
        if number == 1:
            stored.damage(2)
            with pytest.raises(DamagedBatch):
                stored.idents(1)
            stored.submit(100)
        stored.idents(number)
        stored.broker.commit(number)
    assert stored.broker.state.counters.groups_lost_total == 1
    assert stored.bodies.size_bytes() < 12_000


@pytest.mark.anyio
async def test_callers_are_told_to_ask_again_and_the_next_answer_is_whole(stored):
    stored.submit(1, 2, 3)
    stored.damage(2)
    app = create_app(BrokerConfig(store="memory"), stored.broker)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as http:
        refused = await http.get("/v1/batches/1")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["type"].endswith("batch-damaged")
        groups = (await http.get("/v1/batches/1")).json()["groups"]
    assert [group["tokens"][0][0] // 100 for group in groups] == [1, 3]


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite-wal"])
@pytest.mark.parametrize("harm", ["removed", "replaced", "cut"])
def test_nothing_is_acknowledged_into_a_ledger_that_someone_removed_replaced_or_cut(stored, name, harm):
    stored.submit(1)
    path = stored.path / name
    if harm == "cut":
        os.truncate(path, 100)
    else:
        path.rename(stored.path / "elsewhere")
        if harm == "replaced":
            path.write_bytes(b"")
    with pytest.raises(StoreUnavailable, match=f"{name} was removed, replaced or cut"):
        stored.submit(2)
    if harm != "cut":
        (stored.path / "elsewhere").rename(path)
        stored.submit(3)


@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_groups_go_to_a_new_segment_if_someone_removed_or_cut_the_one_they_went_to(stored, harm):
    stored.submit(1, 2)
    (path,) = (stored.path / "segments").glob("*.log")
    if harm == "removed":
        path.unlink()
    else:
        os.truncate(path, 100)
    stored.submit(3, 4)
    stored.reopen()
    assert stored.idents(1) == [3, 4]


@pytest.mark.anyio
async def test_a_removed_ledger_makes_the_broker_unready(stored):
    app = create_app(BrokerConfig(store=str(stored.path)), stored.broker)
    (stored.path / "ledger.sqlite").unlink()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as caller:
        body = {"name": "other", "group_size": 4, "max_token_length": 9}
        refused = await caller.post("/v1/environments", json=body)
        assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (503, "store-unavailable")
        assert (await caller.get("/readyz")).status_code == 503
