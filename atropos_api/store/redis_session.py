"""The connection to Redis: a lease that makes one broker the active one, and writes that only its holder can make.

Each acquisition of the lease has a value of its own. Every write is a script that first compares it with the value in
Redis, so that a broker that lost its lease while it was stopped changes nothing, nor does a command of its own that was
delayed on the network.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from atropos_api.common.errors import AtroposError
from atropos_api.common.identity import find_host_error
from atropos_api.errors import StoreUnavailable, StoreUnsafe

LEASE: Final = "atropos:lease"
CHUNK: Final = 1000
"""Most arguments of one command: Lua's stack holds some thousands."""

APPLY_SCRIPT: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local at = 2
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + count))
  at = at + count + 1
end
return 1
"""
ACQUIRE_SCRIPT: Final = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
RENEW_SCRIPT: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
RELEASE_SCRIPT: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"
ROOMLESS: Final = ("DEL", "atropos:nothing")
"""A write that a full Redis accepts. Redis judges a script by its first write, and then accepts the others too."""

_DATABASE: Final = re.compile(r"/?|/[0-9]+", re.ASCII)
"""The path of an address: none, or the number of a database."""

PROMISES: Final = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}

Argument = str | int | float | bytes
Command = tuple[Argument, ...]


def is_redis(place: str) -> bool:
    return place.startswith(("redis://", "rediss://"))


def connect(url: str, *, timeout_seconds: float) -> Any:
    """Return a client that fails at once instead of repeating a command that may have been executed."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise AtroposError(
            "--store redis:// needs the redis package: pip install 'atropos-grpo[redis]', or name a directory"
        ) from None
    try:
        _check_database(url)
        client = redis.Redis.from_url(
            url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds, retry=Retry(NoBackoff(), 0)
        )
        client.connection_pool.make_connection()  # connects to nothing, but raises for an unknown option of the address
    except (TypeError, ValueError) as error:
        raise AtroposError(f"--store {without_password(url)}: {error}; write redis://host:port/database") from error
    return client


def _check_database(url: str) -> None:
    """Raise `ValueError` for a database that is not a number: redis-py would take 0, in which others may have data."""
    if _DATABASE.fullmatch(urlsplit(url).path) is None:
        raise ValueError("the database is a number")


def without_password(url: str) -> str:
    """Return the address without what comes before the host, and without options, of which one may be a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a malformed host
        scheme, _, rest = url.partition("?")[0].partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def boot_seconds() -> float:
    """Return the time of a clock that goes on while the machine sleeps, unlike the monotonic one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class RedisSession:
    """One process's connection to one Redis, and its lease. Each acquisition of the lease begins a term."""

    def __init__(self, url: str, *, lease_seconds: float) -> None:
        self.place = without_password(url)
        self.lease_seconds = lease_seconds
        self._client = connect(url, timeout_seconds=max(1.0, lease_seconds / 3))
        self._apply = self._client.register_script(APPLY_SCRIPT)
        self.term = RedisTerm(self, "", held_until=0.0)
        self._has_answered = False

    @property
    def held(self) -> bool:
        """True if this broker may act: no other broker can get the lease before its own ends."""
        return self.term.held

    def acquire(self) -> bool:
        """Become the active broker if there is none (or if it was this one); return False otherwise."""
        value = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "term": uuid.uuid4().hex})
        asked_at = boot_seconds()
        if not self._run(ACQUIRE_SCRIPT, self.term.value, value, self._lease_milliseconds()):
            return False
        self.term = RedisTerm(self, value, held_until=asked_at + self.lease_seconds)
        return True

    def renew(self) -> bool:
        """Stay the active broker; return False if another one is, or none."""
        asked_at = boot_seconds()
        if self.held and self._run(RENEW_SCRIPT, self.term.value, self._lease_milliseconds()):
            self.term.hold_until(asked_at + self.lease_seconds)
        else:
            self.step_down()
        return self.held

    def step_down(self) -> None:
        """Stop acting, because it is not certain what Redis holds. The lease can be acquired again."""
        self.term.give_up()

    def release(self) -> None:
        """Release the lease, so that a standby can take over at once."""
        self.step_down()
        self._run(RELEASE_SCRIPT, self.term.value)

    def holder(self) -> dict[str, Any] | None:
        """Return the host and process id of the active broker; None if there is none."""
        value = self.call("GET", LEASE)
        return {name: member for name, member in json.loads(value).items() if name != "term"} if value else None

    def check_promises(self) -> None:
        """Raise `StoreUnsafe` for a Redis that may lose writes it acknowledged."""
        with self._in_own_words():
            found = {name: self._setting(name) for name in (*PROMISES, "maxmemory", "maxmemory-policy")}
        broken = [name for name, wanted in PROMISES.items() if found[name] not in {wanted, None}]
        if broken:
            changes = " and ".join(f"CONFIG SET {name} {PROMISES[name]}" for name in broken)
            state = ", ".join(f"{name} {found[name]}" for name in broken)
            raise StoreUnsafe(
                f"{self.place} may lose writes that it acknowledged ({state}); run redis-cli {changes}, and set "
                "the same in its redis.conf"
            )
        if found["maxmemory"] not in {"0", None} and found["maxmemory-policy"] != "noeviction":
            raise StoreUnsafe(
                f"{self.place} deletes data when its memory is full (maxmemory-policy {found['maxmemory-policy']}); "
                "run redis-cli CONFIG SET maxmemory-policy noeviction"
            )

    def close(self) -> None:
        self._client.close()

    def call(self, *command: Argument) -> Any:
        with self._in_own_words():
            return self._client.execute_command(*command)

    def apply(self, arguments: Sequence[Argument]) -> bool:
        """Run the script that writes; return False if the lease has another value by now."""
        with self._in_own_words():
            return bool(self._apply(keys=[LEASE], args=arguments))

    def _run(self, script: str, *arguments: Argument) -> Any:
        return self.call("EVAL", script, 1, LEASE, *arguments)

    def _setting(self, name: str) -> str | None:
        """Return a setting of the server; None where the server does not report it."""
        from redis.exceptions import ResponseError

        try:
            found = self._client.execute_command("CONFIG GET", name)
        except ResponseError:
            return None
        values = {_text(key): _text(value) for key, value in found.items()}
        return values.get(name)

    def _lease_milliseconds(self) -> int:
        return int(self.lease_seconds * 1000)

    @contextmanager
    def _in_own_words(self) -> Iterator[None]:
        """Turn errors of Redis into `StoreUnavailable`; after a lost answer step down, as the command may have run."""
        from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

        try:
            yield
            self._has_answered = True
        except ResponseError as error:
            raise StoreUnavailable(f"{self.place} refused a write ({error}); nothing was kept") from error
        except (AuthenticationError, AuthorizationError) as error:
            self.step_down()
            raise StoreUnavailable(
                f"{self.place} refused this broker ({error}); check its user and password"
            ) from error
        except (RedisError, OSError) as error:
            self.step_down()
            if (unknown := find_host_error(error, answered=self._has_answered)) is not None:
                raise StoreUnavailable(
                    f"--store {self.place}: there is no such host ({unknown.strerror}); check the spelling"
                ) from error
            raise StoreUnavailable(
                f"{self.place} does not answer ({error}); the broker continues once Redis answers", is_outage=True
            ) from error


class RedisTerm:
    """The period in which one broker is active: it stages writes and makes reads, and refuses both once it is over.

    One thread renews while another writes. A term that was given up stays so, even if a renewal that was in flight just
    then succeeds: memory and Redis may differ by now, and only a new term reads what Redis holds.
    """

    def __init__(self, session: RedisSession, value: str, *, held_until: float) -> None:
        self.place = session.place
        self.value = value
        self._session = session
        self._held_until = held_until
        self._given_up = False
        self._bodies: list[Command] = []
        self._rows: list[Command] = []
        self._removals: list[Command] = []

    @property
    def held(self) -> bool:
        return not self._given_up and boot_seconds() < self._held_until

    def hold_until(self, seconds: float) -> None:
        """Extend the term: no other broker can get the lease before this time of `boot_seconds`."""
        self._held_until = seconds

    def give_up(self) -> None:
        self._given_up = True

    @property
    def staged(self) -> tuple[int, int]:
        """Numbers of staged body and row commands, for `unstage`."""
        return len(self._bodies), len(self._rows)

    def stage(self, *command: Argument) -> None:
        """Add a write to those that the next `apply` makes together."""
        self._rows.append(command)

    def stage_body(self, *command: Argument) -> None:
        """Add a body write, which a Redis without room refuses along with all else that the next `apply` makes."""
        self._bodies.append(command)

    def stage_removal(self, key: str, fields: Sequence[Argument]) -> None:
        """Add the removal of unneeded data: it stays staged until an `apply` succeeds, whatever else is refused."""
        self._removals += _in_chunks("HDEL", key, fields)

    def unstage(self, staged: tuple[int, int]) -> None:
        """Drop what was staged since `staged` was read, except removals."""
        bodies, rows = staged
        del self._bodies[bodies:], self._rows[rows:]

    def stage_many(self, name: str, key: str, members: Sequence[Argument]) -> None:
        self._rows += _in_chunks(name, key, members)

    def apply(self) -> None:
        """Make all staged writes, or none of them."""
        # Rows are small and removals free memory, so only bodies have to wait for room.
        commands = [*(self._bodies or [ROOMLESS]), *self._rows, *self._removals]
        self._bodies, self._rows = [], []
        arguments: list[Argument] = [self.value]
        for command in commands:
            arguments += (len(command), *command)
        self._check_held()
        if not self._session.apply(arguments):
            self.give_up()
            raise StoreUnavailable(f"another broker took over {self.place}; nothing was kept here, send it there")
        self._removals = []

    def ask(self, *command: Argument) -> Any:
        """Read from Redis. The lease is held before and after it, so no other broker changed the data in between."""
        self._check_held()
        found = self._session.call(*command)
        self._check_held()
        return found

    def end(self) -> None:
        """Apply what is staged, and release the lease."""
        self.apply()
        self._session.release()

    def _check_held(self) -> None:
        if self._session.term is not self or not self.held:
            raise StoreUnavailable(f"this broker is not the active one on {self.place} (any more); repeat the request")


def _in_chunks(name: str, key: str, members: Sequence[Argument]) -> list[Command]:
    return [(name, key, *members[start : start + CHUNK]) for start in range(0, len(members), CHUNK)]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
