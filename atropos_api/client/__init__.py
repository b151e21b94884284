"""Clients of the broker for environments and trainers: a blocking and an async one over one table of calls.

In reading order: `calls` (each call as data, and its errors), `connection` (the token, and when to repeat a call),
`blocking`, `asynchronous`, `events` (the event stream). It may import `wire`, `errors` and `common`.
"""

from atropos_api.client.asynchronous import AsyncBrokerClient
from atropos_api.client.blocking import BrokerClient
from atropos_api.client.calls import (
    BatchCommitted,
    BrokerHostUnknown,
    BrokerRefused,
    BrokerUnreachable,
    GroupNotEncodable,
    RunSuperseded,
    is_outage,
)
from atropos_api.client.events import ServerEvent, watch_events

__all__ = [
    "AsyncBrokerClient",
    "BatchCommitted",
    "BrokerClient",
    "BrokerHostUnknown",
    "BrokerRefused",
    "BrokerUnreachable",
    "GroupNotEncodable",
    "RunSuperseded",
    "ServerEvent",
    "is_outage",
    "watch_events",
]
