"""A backup that is taken while the broker works holds all that was acknowledged before it, and opens as a store."""

import io
import itertools
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import closing, contextmanager

import httpx
import msgspec

from atropos_api.client import BrokerClient
from atropos_api.store.segments import SegmentLog
from atropos_api.testing import make_group, served_broker
from atropos_api.wire import EnvironmentRequest, RunRequest
from example_trainer.processes.ports import free_port

BATCH = 8
SIZE = 4
RUN = RunRequest(name="kept", batch_size=BATCH, max_token_length=64, num_steps=10_000)
SMALL_SEGMENTS = """
import sys
from atropos_api.cli import run
from atropos_api.store.segments import SegmentLog

SegmentLog.__init__.__kwdefaults__["segment_bytes"] = 20_000
sys.exit(run(sys.argv[1:]))
"""
"""A broker whose segments are sealed, compacted and deleted all the time."""


@contextmanager
def broker(store, *flags):
    port = free_port()
    command = [sys.executable, "-c", SMALL_SEGMENTS, "--store", str(store), "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        with BrokerClient(url) as client:
            client.wait_until_ready(30)
            yield client
    finally:
        process.terminate()
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log


def back_up(client, **headers):
    answer = httpx.get(f"{client.url}/v1/backup", headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    return answer.content


def unpack(tar, folder):
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert {member.mode for member in archive} == {0o600}
        archive.extractall(folder, filter="data")
    return folder


def group_of(ident):
    """A group whose first token is unique."""
    group = make_group(SIZE, 24)
    for tokens in group.tokens:
        tokens[0] = ident
    return group


def idents_in(batch):
    return [group.tokens[0][0] for group in batch.groups]


class Work:
    """Environments that submit and a trainer that commits, at one broker; `acknowledged` grows as they do."""

    def __init__(self, client):
        self.client = client
        self.run = client.begin_run(RUN)
        environment = EnvironmentRequest(name="env", group_size=SIZE, max_token_length=64)
        self.environment = client.register_environment(environment).environment_id
        self.acknowledged = []
        self.committed = 0
        self.trained = {}
        self._idents = itertools.count(1)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._submit) for _ in range(2)] + [
            threading.Thread(target=self._train)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _submit(self):
        with BrokerClient(self.client.url) as client:
            while not self._stop.is_set():
                ident = next(self._idents)
                client.submit(self.environment, [group_of(ident)], idempotency_key=str(ident))
                self.acknowledged.append(ident)

    def _train(self):
        with BrokerClient(self.client.url) as client:
            for number in itertools.count(1):
                batch = None
                while batch is None:
                    if self._stop.is_set():
                        return
                    batch = client.get_batch(number, run_id=self.run.run_id, epoch=self.run.epoch, wait_seconds=1)
                self.trained[number] = idents_in(batch)
                if number > 3:
                    client.commit(number - 3, run_id=self.run.run_id, epoch=self.run.epoch)
                    self.committed = number - 3


def test_what_was_acknowledged_before_a_backup_is_in_the_broker_that_starts_from_it(tmp_path):
    backups = []
    with broker(tmp_path / "store", "--fsync", "interval") as client, Work(client) as work:
        for _ in range(5):
            time.sleep(0.4)
            before, committed = list(work.acknowledged), work.committed
            backups.append((back_up(client), before, committed))
    assert len({len(tar) for tar, _, _ in backups}) > 1
    for index, (tar, before, committed_before) in enumerate(backups):
        with broker(unpack(tar, tmp_path / f"restored-{index}")) as client:
            assert client.status()["counters"]["groups_lost_total"] == 0
            committed = client.status()["run"]["committed_batch"]
            held = take_all(client, committed)
            assert committed >= committed_before
            assert {number: idents for number, idents in held.items() if number in work.trained}.items() <= (
                work.trained.items()
            ), "a batch that a trainer has seen was formed anew"
            gone = {ident for number in range(1, committed + 1) for ident in work.trained[number]}
            found = {ident for idents in held.values() for ident in idents}
            missing = set(before) - gone - found
            assert len(missing) <= client.status()["queue"]["groups"] < BATCH // SIZE
            assert not gone & found


def take_all(client, committed):
    """Resume the run from its last committed batch; return the idents of all batches that there are, by number."""
    info = client.begin_run(msgspec.structs.replace(RUN, resume=True, take_over=True, resume_from_batch=committed))
    held = {}
    batch = client.get_batch(info.next_batch, run_id=info.run_id, epoch=info.epoch, wait_seconds=0)
    while batch is not None:
        held[batch.number] = idents_in(batch)
        client.commit(batch.number, run_id=info.run_id, epoch=info.epoch)
        batch = client.get_batch(batch.number + 1, run_id=info.run_id, epoch=info.epoch, wait_seconds=0)
    return held


def test_a_backup_of_an_earlier_release_is_opened_and_converted(tmp_path):
    with broker(tmp_path / "store") as client:
        client.begin_run(RunRequest(name="old", batch_size=BATCH, max_token_length=64, num_steps=3))
        environment = client.register_environment(EnvironmentRequest(name="e", group_size=SIZE, max_token_length=64))
        client.submit(environment.environment_id, [group_of(1)], idempotency_key="1")
        tar = back_up(client)
    store = unpack(tar, tmp_path / "restored")
    with closing(sqlite3.connect(store / "ledger.sqlite")) as db:
        db.executescript("ALTER TABLE groups DROP COLUMN form; DROP TABLE events; PRAGMA user_version = 1;")
        db.executescript("ALTER TABLE groups DROP COLUMN policy; DROP TABLE metric_names; DROP TABLE metrics;")
        db.executescript(
            "DROP TABLE unanswered; DROP TABLE expected; ALTER TABLE places ADD COLUMN answered_seq INTEGER DEFAULT 9;"
        )
    with broker(store) as client:
        status = client.status()
        assert (status["run"]["name"], status["queue"]["groups"]) == ("old", 1)


def test_a_backup_needs_the_token_and_no_page_of_another_site_can_cause_one():
    token = "a-token-of-the-test"
    with served_broker(token=token) as url:
        assert httpx.get(f"{url}/v1/backup").status_code == 401
        answer = httpx.get(f"{url}/v1/backup", headers={"Authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "no-backup")
    with served_broker() as url:
        page = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        assert httpx.get(f"{url}/v1/backup", headers=page).status_code == 403


def test_segments_that_are_deleted_while_a_backup_is_sent_are_in_it(tmp_path):
    from atropos_api.store.backup import Backup

    log = SegmentLog(tmp_path / "segments", segment_bytes=100)
    refs = [ref for number in range(6) for ref in log.append([bytes([number]) * 90])]
    backup = Backup(b"ledger", log.open_all())
    pieces, size = backup.pieces(), backup.size_bytes
    first = next(pieces)
    log.discard(refs)
    assert len(list((tmp_path / "segments").glob("*.log"))) == 1
    whole = first + b"".join(pieces)
    assert len(whole) == size
    backup.close()
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        names = [member.name for member in archive]
        bodies = [archive.extractfile(member).read()[12:] for member in archive if member.name != "ledger.sqlite"]
    assert names[0] == "ledger.sqlite"
    assert bodies == [bytes([number]) * 90 for number in range(6)]
    log.close()
