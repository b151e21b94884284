"""A standby that cannot take over stands in no other broker's way."""

from __future__ import annotations

from typing import Any

import pytest

from atropos_api.errors import StoreUnavailable
from atropos_api.server.standby import Standby


class Lease:
    """The lease in Redis, as the scripts of `RedisSession` change it; `answers` is False while Redis is gone."""

    def __init__(self) -> None:
        self.holder: Session | None = None
        self.answers = True


class Session:
    """One broker's connection to that Redis."""

    place, lease_seconds = "redis://there/0", 10.0

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.held = False

    def acquire(self) -> bool:
        if self._lease.holder not in (None, self):
            return False
        self._lease.holder, self.held = self, True
        return True

    def release(self) -> None:
        self.held = False
        if not self._lease.answers:
            raise StoreUnavailable("redis://there/0 does not answer", is_outage=True)
        if self._lease.holder is self:
            self._lease.holder = None

    def step_down(self) -> None:
        self.held = False

    def check_promises(self) -> None: ...

    def renew(self) -> bool:
        return self.held

    def holder(self) -> dict[str, Any]:
        return {"host": "other", "pid": 1}


def standby(session: Session, error: Exception | None = None) -> Standby:
    def activate(*, fresh: bool) -> Any:
        assert not fresh
        if error is not None:
            raise error
        return object(), object()

    made: Any = session
    return Standby(made, activate)


@pytest.mark.parametrize("error", [ValueError("a row of another release"), StoreUnavailable("it refused a write")])
def test_a_broker_that_cannot_take_over_leaves_the_lease_to_one_that_can(error: Exception) -> None:
    lease = Lease()
    unable, able = Session(lease), Session(lease)
    standby(unable, error)._try_to_lead()
    assert not unable.held
    standby(able)._try_to_lead()
    assert lease.holder is able


def test_a_lease_that_cannot_be_returned_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    lease = Lease()
    session = Session(lease)
    lease.answers = False
    standby(session, ValueError("a row of another release"))._try_to_lead()
    assert not session.held
    assert "this broker could not take over" in caplog.text
