"""A store that cannot be opened is reported in one line that names the path."""

import socket
import sqlite3
from contextlib import closing
from unittest.mock import Mock

import pytest

from atropos_api.broker import Broker
from atropos_api.cli import run
from atropos_api.common.errors import AtroposError, Outage
from atropos_api.config import BrokerConfig
from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.factory import open_store
from atropos_api.store.redis_session import RedisSession, connect


def occupied(path, name, *, folder=False):
    path.mkdir()
    (path / name).mkdir() if folder else (path / name).write_bytes(b"no database, and longer than a header of one is")
    return path


PLACES = {
    "in /proc": lambda path: "/proc/nowrite",
    "a device": lambda path: "/dev/null",
    "a file": lambda path: occupied(path, "file") / "file",
    "below a file": lambda path: occupied(path, "file") / "file" / "store",
    "read-only": lambda path: "/sys/store",
    "a folder for the lock": lambda path: occupied(path, "lock", folder=True),
    "a file for the segments": lambda path: occupied(path, "segments"),
    "a folder for the ledger": lambda path: occupied(path, "ledger.sqlite", folder=True),
    "no database": lambda path: occupied(path, "ledger.sqlite"),
    "too long a name": lambda path: path / ("x" * 300),
    "a loop": lambda path: path.symlink_to(path) or path,
    "a link to nothing": lambda path: path.symlink_to("/nonexistent/place") or path,
    "nobody's home": lambda path: "~nosuchuser/store",
}


@pytest.mark.parametrize("kind", PLACES)
def test_it_is_one_line_with_the_place_and_a_way_out(tmp_path, kind):
    place = str(PLACES[kind](tmp_path / "place"))
    with pytest.raises(AtroposError) as caught:
        open_store(place)
    assert "\n" not in str(caught.value)
    assert place[:100] in str(caught.value)


@pytest.mark.parametrize(
    "place", ["http://localhost:6379/0", "file:///tmp/store", "redis:/localhost:6379/0", "a\0b", ""]
)
def test_what_is_no_place_at_all_is_refused_before_anything_is_made(place):
    with pytest.raises(ValueError, match="name a directory, say memory, or give the URL of a Redis"):
        BrokerConfig(store=place)


@pytest.mark.parametrize(
    "place",
    [
        "redis://[::1/0",
        "rediss://user:pa@55word@[::1/0",
        "redis://[::1/0?password=55word",
        "redis://host:99999/0",
        "redis://host/0?pasword=55word",
        "redis://host/0?password=55word&socket_timeout=soon",
    ],
)
def test_a_malformed_address_of_a_redis_is_one_line_without_its_password(place):
    pytest.importorskip("redis")
    with pytest.raises(AtroposError, match="write redis://host:port/database") as caught:
        open_store(place)
    assert "\n" not in str(caught.value)
    assert "55word" not in str(caught.value)


@pytest.mark.parametrize("place", ["redis://host/name", "redis://user:55word@host/1/2", "redis://host/-1"])
def test_a_database_of_a_redis_that_is_no_number_is_not_taken_for_another_one(place):
    pytest.importorskip("redis")
    with pytest.raises(AtroposError, match="the database is a number; write redis://host:port/database") as caught:
        open_store(place)
    assert "55word" not in str(caught.value)


@pytest.mark.parametrize("place", ["redis://host", "redis://host/", "rediss://host:6380/3", "redis:///?db=2"])
def test_the_database_of_a_redis_may_be_left_out(place):
    pytest.importorskip("redis")
    connect(place, timeout_seconds=1.0).close()


@pytest.mark.parametrize("place", ["redis://user:55word@host:1/0", "redis://host:1/0?password=55word"])
def test_a_redis_is_named_without_its_password(place):
    pytest.importorskip("redis")
    assert RedisSession(place, lease_seconds=1.0).place == "redis://host:1/0"


def damage_rows(place):
    with closing(sqlite3.connect(place / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("INSERT INTO runs VALUES ('run', '{}')")


def damage_pages(place):
    with closing(sqlite3.connect(place / "ledger.sqlite")) as ledger:
        ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = ledger.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'groups'").fetchone()
        (size,) = ledger.execute("PRAGMA page_size").fetchone()
    with (place / "ledger.sqlite").open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)


@pytest.mark.parametrize("damage", [damage_rows, damage_pages])
def test_a_ledger_that_opens_and_cannot_be_read_is_one_line_too(tmp_path, damage):
    for part in reversed(open_store(str(tmp_path))):
        part.close()
    damage(tmp_path)
    ledger, bodies = open_store(str(tmp_path))
    with pytest.raises(StoreDamaged, match=r"cannot be used as the broker's ledger: .*--fresh begins anew"):
        Broker(ledger, bodies)
    bodies.close()
    ledger.close()


def test_a_broker_that_starts_before_its_redis_ends_with_a_code_after_which_it_is_started_again(monkeypatch):
    """It ended with 2, after which systemd does not start it again, and said that it continues once Redis answers."""
    for name in ("setup_logging", "keep_freed_memory"):
        monkeypatch.setattr(f"atropos_api.cli.{name}", Mock())
    with pytest.raises(Outage, match=r"redis://127\.0\.0\.1:1/0 does not answer"):
        run(["--store", "redis://127.0.0.1:1/0", "--port", "0"])


@pytest.mark.usefixtures("no_such_name")
def test_a_mistyped_host_of_a_redis_ends_the_broker_for_good(monkeypatch):
    """It counted as a Redis that is down, for which systemd started the broker again without end."""
    pytest.importorskip("redis")
    for name in ("setup_logging", "keep_freed_memory"):
        monkeypatch.setattr(f"atropos_api.cli.{name}", Mock())
    with pytest.raises(
        StoreUnavailable, match=r"--store redis://rdis\.invalid:6379/0: there is no such host"
    ) as refused:
        run(["--store", "redis://rdis.invalid:6379/0", "--port", "0"])
    assert not refused.value.is_outage


def test_the_host_of_a_redis_that_has_answered_may_be_unknown_for_a_while(monkeypatch):
    pytest.importorskip("redis")
    session = RedisSession("redis://of-a-pod:6379/0", lease_seconds=1.0)
    lost = Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    monkeypatch.setattr(session._client, "execute_command", Mock(return_value=None))
    assert session.holder() is None
    monkeypatch.setattr(session._client, "execute_command", lost)
    with pytest.raises(StoreUnavailable, match="does not answer") as caught:
        session.holder()
    assert caught.value.is_outage
