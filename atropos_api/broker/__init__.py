"""All rules of the broker and nothing of HTTP: who may do what, which groups make a batch, how runs follow one
another.

In reading order: `broker` (the calls), `state` (what the parts share), `submissions` and `queue` (groups in),
`packing` and `batches` (batches out), `runs`, `run_succession` and `policy_holds` (runs and policies),
`environments` and `pacing` (who produces, and how much), `recovery` (after a crash, and compaction), `counters` and
`status` (what is reported), `v0` (the Atropos contract on top). It may import `store`, `wire`, `errors` and
`common`.
"""

from atropos_api.broker.broker import Broker
from atropos_api.broker.state import BrokerSettings

__all__ = ["Broker", "BrokerSettings"]
