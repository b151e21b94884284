"""How environments and trainers call the broker: one client that blocks, one that does not, the same calls."""

from atropos_api.client.asynchronous import AsyncBrokerClient
from atropos_api.client.blocking import BrokerClient
from atropos_api.client.errors import (
    BatchCommitted,
    BrokerHostUnknown,
    BrokerRefused,
    BrokerUnreachable,
    RunSuperseded,
)
from atropos_api.client.watching import ServerEvent, watch_events

__all__ = [
    "AsyncBrokerClient",
    "BatchCommitted",
    "BrokerClient",
    "BrokerHostUnknown",
    "BrokerRefused",
    "BrokerUnreachable",
    "RunSuperseded",
    "ServerEvent",
    "watch_events",
]
