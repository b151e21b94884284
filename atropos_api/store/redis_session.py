"""Redis as this broker sees it: a lease that makes one broker the active one, and writes that only its holder can make.

Each acquisition has a value of its own. Every write is a script that first compares it with what Redis holds, so that a
broker that lost its lease while it was stopped, or a command of its own that was delayed on the wire, changes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from atropos_api.errors import AtroposError, StoreUnavailable, StoreUnsafe

LEASE: Final = "atropos:lease"
CHUNK: Final = 1000
"""Arguments of one command: Lua's stack holds some thousands."""

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

PROMISES: Final = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}

Argument = str | int | float | bytes


def is_redis(place: str) -> bool:
    return place.startswith(("redis://", "rediss://"))


def connect(url: str, *, timeout_seconds: float) -> Any:
    """A client that fails at once instead of repeating what may have been done."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise AtroposError(
            "--store redis:// needs the redis package: pip install 'atropos-grpo[redis]', or name a directory"
        ) from None
    try:
        return redis.Redis.from_url(
            url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise AtroposError(f"--store {without_password(url)}: {error}; write redis://host:port/database") from error


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def boot_seconds() -> float:
    """A clock that goes on while the machine sleeps, unlike the monotonic one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class RedisSession:
    """One process's dealings with one Redis: the connection and the lease. Each time it is acquired begins a term."""

    def __init__(self, url: str, *, lease_seconds: float) -> None:
        self.place = without_password(url)
        self.lease_seconds = lease_seconds
        self._client = connect(url, timeout_seconds=max(1.0, lease_seconds / 3))
        self._apply = self._client.register_script(APPLY_SCRIPT)
        self._held_until = 0.0
        self.term = RedisTerm(self, "")

    @property
    def held(self) -> bool:
        """Whether this broker may act: nobody else can have the lease before this ends."""
        return boot_seconds() < self._held_until

    def acquire(self) -> bool:
        """Become the active broker, if there is none (or if it was this one)."""
        value = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "term": uuid.uuid4().hex})
        asked_at = boot_seconds()
        if not self._run(ACQUIRE_SCRIPT, self.term.value, value, self._lease_milliseconds()):
            return False
        self.term = RedisTerm(self, value)
        self._held_until = asked_at + self.lease_seconds
        return True

    def renew(self) -> bool:
        """Stay the active broker; False if another one is, or nobody."""
        asked_at = boot_seconds()
        renewed = self.held and bool(self._run(RENEW_SCRIPT, self.term.value, self._lease_milliseconds()))
        self._held_until = asked_at + self.lease_seconds if renewed else 0.0
        return renewed

    def step_down(self) -> None:
        """Act no more: what Redis holds is not known for certain. The lease can be acquired again."""
        self._held_until = 0.0

    def release(self) -> None:
        """Let a standby take over at once."""
        self._held_until = 0.0
        self._run(RELEASE_SCRIPT, self.term.value)

    def holder(self) -> dict[str, Any] | None:
        """Who is active."""
        value = self.call("GET", LEASE)
        return {name: member for name, member in json.loads(value).items() if name != "term"} if value else None

    def check_promises(self) -> None:
        """Refuse a Redis that would forget what it acknowledged."""
        with self._in_own_words():
            found = {name: self._setting(name) for name in (*PROMISES, "maxmemory", "maxmemory-policy")}
        broken = [name for name, wanted in PROMISES.items() if found[name] not in {wanted, None}]
        if broken:
            changes = " and ".join(f"CONFIG SET {name} {PROMISES[name]}" for name in broken)
            state = ", ".join(f"{name} {found[name]}" for name in broken)
            raise StoreUnsafe(
                f"{self.place} may forget what it acknowledged ({state}); tell it with redis-cli {changes}, and in its "
                "redis.conf"
            )
        if found["maxmemory"] not in {"0", None} and found["maxmemory-policy"] != "noeviction":
            raise StoreUnsafe(
                f"{self.place} deletes data when its memory is full (maxmemory-policy {found['maxmemory-policy']}); "
                "tell it with redis-cli CONFIG SET maxmemory-policy noeviction"
            )

    def close(self) -> None:
        self._client.close()

    def call(self, *command: Argument) -> Any:
        with self._in_own_words():
            return self._client.execute_command(*command)

    def apply(self, arguments: Sequence[Argument]) -> bool:
        """Run the script that writes; False if the lease has another value by now."""
        with self._in_own_words():
            return bool(self._apply(keys=[LEASE], args=arguments))

    def _run(self, script: str, *arguments: Argument) -> Any:
        return self.call("EVAL", script, 1, LEASE, *arguments)

    def _setting(self, name: str) -> str | None:
        """A setting of the server; None where it does not tell."""
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
        """What went wrong in the store's words. After a lost answer this broker steps down: it may have been done."""
        from redis.exceptions import RedisError, ResponseError

        try:
            yield
        except ResponseError as error:
            raise StoreUnavailable(f"{self.place} refused a write ({error}); nothing was kept") from error
        except (RedisError, OSError) as error:
            self.step_down()
            raise StoreUnavailable(
                f"{self.place} does not answer ({error}); the broker goes on when it is back"
            ) from error


class RedisTerm:
    """The time in which one broker is active: staged writes and reads, refused once the term is over."""

    def __init__(self, session: RedisSession, value: str) -> None:
        self.place = session.place
        self.value = value
        self._session = session
        self._staged: list[tuple[Argument, ...]] = []

    @property
    def staged_count(self) -> int:
        return len(self._staged)

    def stage(self, *command: Argument) -> None:
        """Add a write to those that the next `apply` makes together."""
        self._staged.append(command)

    def unstage(self, count: int) -> None:
        """Drop what was staged after the first `count`."""
        del self._staged[count:]

    def stage_many(self, name: str, key: str, members: Sequence[Argument]) -> None:
        for start in range(0, len(members), CHUNK):
            self.stage(name, key, *members[start : start + CHUNK])

    def apply(self) -> None:
        """Make all staged writes, or none of them."""
        staged, self._staged = self._staged, []
        arguments: list[Argument] = [self.value]
        for command in staged:
            arguments += (len(command), *command)
        self._check_held()
        if not self._session.apply(arguments):
            self._session.step_down()
            raise StoreUnavailable(f"another broker took over {self.place}; nothing was kept here, ask that one")

    def ask(self, *command: Argument) -> Any:
        """A read."""
        self._check_held()
        return self._session.call(*command)

    def end(self) -> None:
        """Make what is staged, and give the lease back."""
        self.apply()
        self._session.release()

    def _check_held(self) -> None:
        if self._session.term is not self or not self._session.held:
            raise StoreUnavailable(f"this broker is not the active one on {self.place} (any more); ask again")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
