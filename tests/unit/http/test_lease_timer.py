"""The timer that ends leases of inference servers. It stands alone because it runs on uvloop, as the broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import uvloop

from atropos_api.http.context import AppContext


def test_a_lease_that_ends_at_once_does_not_fail_the_next_call() -> None:
    """For a time under a millisecond uvloop returns a handle that does not know it: renewals were answered 500."""
    servers = SimpleNamespace(seconds_to_expiry=lambda: 0.0)
    context: Any = AppContext.__new__(AppContext)
    context.broker = SimpleNamespace(state=SimpleNamespace(servers=servers))
    context._lease_timer = None

    async def watch_twice() -> None:
        context.watch_leases()
        context.watch_leases()
        context._lease_timer.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(watch_twice())
