"""A simulation of days of training in minutes: `python -m tests.simulation.run --seed 7 --events 1000000`.

The broker's real rules and the SDK's real leases run under simulated time with faults of network, disk and clock;
whatever breaks a promise is repeated by its seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Self

from atropos_api.broker import Broker, BrokerSettings

from .disk import SimulatedBodies, SimulatedLedger
from .oracle import Oracle
from .processes import BrokerProcess, Environment, Evaluation, Program, Rival, Simulation, Trainer
from .world import Faults, Network, World

LIMITS = {"small": 48, "large": 24}
"""Items of a run, whose groups of 2 and of 4 sequences fill its 12 batches of 16."""
GROUP_SIZES = {"small": 2, "large": 4}
STEPS, BATCH_SIZE = 12, 16
LOOK_EVERY = 2_000
"""Events between two comparisons of the broker's memory with its disk."""
LONGEST_RUN_SECONDS = 900.0
"""A run takes a minute or two, and a few more if its processes are killed again and again."""


class ForgetfulSettings(BrokerSettings):
    """Settings by which a broker forgets the keys of submissions within a run, so that forgetting is simulated too."""

    key_memory_seconds = 600.0


class Run:
    """One simulation: `epochs` are trained whole, or else groups grow too old and items never end."""

    def __init__(self, seed: int, *, epochs: bool = True, faults: Faults | None = None) -> None:
        self.world = World(seed, faults)
        self.oracle = Oracle()
        settings = ForgetfulSettings(max_uncommitted=8)
        self.process = BrokerProcess(self.world, self.oracle, settings)
        self.simulation = Simulation(
            self.world,
            self.oracle,
            self.process,
            Network(self.world),
            limits=LIMITS if epochs else None,
            steps=STEPS,
            batch_size=BATCH_SIZE,
            max_staleness=None if epochs else 1,
        )
        trainer = Trainer(self.simulation)
        self.programs: list[Program] = [
            trainer,
            *(Environment(self.simulation, name, size) for name, size in GROUP_SIZES.items()),
            Evaluation(self.simulation),
        ]
        Rival(self.simulation, trainer)
        self._schedule_kill()
        self._schedule_jump()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()

    def go(self, events: int) -> None:
        """Run this many events, and compare memory and disk now and then."""
        last = self.world.events + events
        while self.world.events < last:
            self.world.run(min(LOOK_EVERY, last - self.world.events))
            self.compare()
            waited = self.world.now - self.oracle.ended_at
            self.oracle.require(waited < LONGEST_RUN_SECONDS, f"no run has ended for {waited:.0f} s")

    def compare(self) -> None:
        """Raise if a broker that started now, from the disk alone, would not know what the present one knows."""
        present = self.process.broker
        if present is None or present.state.store_inconsistent:
            return
        quiet = World(0, Faults(disk_fails=0.0))
        quiet.now, quiet.skew_seconds = self.world.now, self.world.skew_seconds
        ledger, bodies = SimulatedLedger(self.process.disk, quiet), SimulatedBodies(self.process.disk)
        ledger.alive = bodies.alive = False  # the writes of a start must not reach the disk
        restarted = Broker(ledger, bodies, settings=present.settings, clock=quiet.wall_clock)
        self.oracle.require(
            described(restarted) == described(present),
            f"after a restart the broker would know {described(restarted)} instead of {described(present)}",
        )

    def _schedule_kill(self) -> None:
        chance = self.world.chance

        def kill() -> None:
            victim = chance.choice([self.process, *self.programs])
            victim.kill()
            self._schedule_kill()

        self.world.after(chance.expovariate(1 / self.world.faults.seconds_between_kills), kill)

    def _schedule_jump(self) -> None:
        most = self.world.faults.clock_jump_seconds

        def jump() -> None:
            self.world.skew_seconds += self.world.chance.uniform(-most, most)
            self._schedule_jump()

        self.world.after(self.world.chance.expovariate(1 / 60.0), jump)


def described(broker: Broker) -> dict[str, object]:
    """Return what a broker must know after a restart: groups by place, runs, items and counts."""
    state = broker.state
    return {
        "queue": sorted(group.seq for lane in state.queue.lanes for group in lane),
        "batches": {number: [group.seq for group in groups] for number, groups in state.batches.items()},
        "left over": {run: sorted(group.seq for group in groups) for run, groups in state.left_over.items() if groups},
        "runs": {
            row.run_id: (row.state, row.epoch, row.committed_batch, row.formed_batch, row.policy_version)
            for row in state.runs._rows.values()
        },
        "environments": {row.environment_id: (row.name, row.items, row.outcomes) for row in state.environments},
        "next": state.next_seq,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--stale", action="store_true", help="groups grow too old, and items never end")
    asked = parser.parse_args(argv)
    started = time.process_time()
    with Run(asked.seed, epochs=not asked.stale) as run:
        run.go(asked.events)
    seconds = time.process_time() - started
    sys.stdout.write(
        f"seed {asked.seed}: {run.world.events:,} events, {run.world.now / 3600:.1f} hours of training, "
        f"{run.oracle.runs_finished} runs, {run.oracle.groups_trained:,} groups, "
        f"{run.process.restarts} broker restarts; {run.world.events / seconds * 60:,.0f} events a minute of CPU time\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
