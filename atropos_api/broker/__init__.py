"""All rules of the broker, without HTTP: who may do what, which groups make a batch, how runs follow one another.

In reading order: `broker` (the calls), `state` (what the parts share), `submissions` and `queue` (groups in),
`packing` and `batches` (batches out: how they are formed, expire and are committed), `runs`, `run_succession` and
`policy_holds` (runs and policies), `environments`, `items` and `pacing` (who produces, of what, and how much),
`inference_servers` (who samples, by leases) and `fleets` (how many are wanted), `recovery` (after a crash, and
compaction), `batch_traces` (spans of batches), `v0` (the Atropos contract on top).

For people who watch a run: `activity` and `reports` (the parts' own reports, with the metrics of steps),
`recent_batches` and `rollouts` (groups to look at), `facts`, `findings`, `starting`, `diagnosis` and `flow` (what a run
waits for), `counters` and `status` (all of it as one answer). It may import `page`, `store`, `wire`, `errors` and
`common`.
"""

from atropos_api.broker.broker import Broker
from atropos_api.broker.state import BrokerSettings

__all__ = ["Broker", "BrokerSettings"]
