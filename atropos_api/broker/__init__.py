"""All rules of the broker and nothing of HTTP: who may do what, which groups make a batch, how much is let in."""

from atropos_api.broker.broker import Broker
from atropos_api.broker.settings import BrokerSettings

__all__ = ["Broker", "BrokerSettings"]
