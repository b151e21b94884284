"""The simulated programs: a broker with the real rules, environments, trainers and an evaluation around it.

Each is killed now and then and started again by its supervisor; one that is believed dead may go on next to its
successor. What a program has on its own disk survives, the rest is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.broker.state import SteadyClock
from atropos_api.errors import (
    BatchOutOfOrder,
    BrokerError,
    CommittedBatch,
    NoOpenRun,
    PolicyNotNewer,
    QueueFull,
    RunInProgress,
    StoreUnavailable,
    SupersededRun,
    UnknownEnvironment,
    UnknownHold,
)
from atropos_api.store.failpoints import Failpoint
from atropos_api.wire.group_json import CheckedGroup
from atropos_api.wire.messages import (
    EnvironmentRequest,
    HoldRequest,
    ItemLease,
    ItemRequest,
    PolicyUpdate,
    RunInfo,
    RunRequest,
)
from environments.sdk.runtime.items import GroupKey, ItemLeases, LeasedItem

from .disk import Disk, SimulatedBodies, SimulatedLedger
from .oracle import Oracle
from .world import ConnectionLost, Network, Task, World, sleep

PASSING = (ConnectionLost, StoreUnavailable, QueueFull)
"""Failures after which a client repeats its call."""
ITEMS_APART = 1_000_000
TEMPLATE = '{"tokens":[[%d]],"masks":[[1]],"scores":[0.0]'


class Killed(BaseException):
    """The broker's process ends here, between two lines."""


class _Ident(msgspec.Struct):
    tokens: list[list[int]]


_ident_decoder = msgspec.json.Decoder(_Ident)


class BrokerProcess:
    """The broker: it is down for a while after each kill, and starts from its disk."""

    def __init__(self, world: World, oracle: Oracle, settings: BrokerSettings) -> None:
        self.disk = Disk()
        self.broker: Broker | None = None
        self.restarts = -1
        self._world = world
        self._oracle = oracle
        self._settings = settings
        self._store: tuple[SimulatedLedger, SimulatedBodies] | None = None
        self.start()

    def start(self) -> None:
        self.restarts += 1
        self._store = ledger, bodies = SimulatedLedger(self.disk, self._world), SimulatedBodies(self.disk)
        try:
            self.broker = Broker(
                ledger,
                bodies,
                settings=self._settings,
                clock=SteadyClock(self._world.wall_clock, self._world.steady_seconds),
                monotonic=self._world.steady_seconds,
                reach=self._reach,
            )
        except (Killed, StoreUnavailable):
            self.kill()

    def kill(self) -> None:
        if self._store is not None:
            for part in self._store:
                part.alive = False
            self.broker, self._store = None, None
            self._world.after(self._world.chance.uniform(0.1, 3.0), self.start)

    def serve(self, call: Callable[[Broker], Any]) -> Callable[[], Any]:
        """Return what runs when a request arrives: the call, unless the process is down or is killed in it."""

        def answer() -> Any:
            if self.broker is None:
                return ConnectionLost()
            try:
                if self.broker.state.store_inconsistent:
                    self.broker.rebuild()
                return call(self.broker)
            except Killed:
                self.kill()
                return ConnectionLost()

        return answer

    def _reach(self, _: Failpoint) -> None:
        if self._world.happens(self._world.faults.crash_at_failpoint):
            raise Killed


@dataclass
class Simulation:
    """All that the programs share."""

    world: World
    oracle: Oracle
    process: BrokerProcess
    network: Network
    limits: dict[str, int] | None
    """Number of items of each environment in a run; None: they never end."""
    steps: int
    batch_size: int
    max_staleness: int | None = None
    run_number: int = 1
    run_ids: list[str] = field(default_factory=list)

    async def call(self, serve: Callable[[Broker], Any]) -> Any:
        """Return the broker's answer, repeating the call while it fails in passing; raise any other failure."""
        pause = 0.05
        while True:
            result = await self.network.call(self.process.serve(serve))
            if not isinstance(result, PASSING):
                break
            await sleep(self.world, pause)
            pause = min(2.0, pause * 2)
        if isinstance(result, Exception):
            raise result
        return result

    def ident_of(self, run_id: str, environment: int, number: int) -> int:
        """Return the ident of an item's group; those of different runs and environments are far apart."""
        if run_id not in self.run_ids:
            self.run_ids.append(run_id)
        return (self.run_ids.index(run_id) * 16 + environment) * ITEMS_APART + number

    def run_of(self, ident: int) -> str:
        return self.run_ids[ident // ITEMS_APART // 16]


class Program:
    """A program that a supervisor starts again: `main` runs in a task of its own, with the tasks that it starts."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.tasks: list[Task] = []
        self.begun = 0
        self.start()

    def start(self) -> None:
        self.begun += 1
        self.tasks = []
        self.spawn(self.main())

    def spawn(self, work: Any) -> None:
        self.tasks = [task for task in self.tasks if not task.ended]
        self.tasks.append(self.world.start(work))

    def kill(self) -> None:
        """End the process, or leave it for a while as one that is not known to run; a successor starts meanwhile."""
        lives_on = self.world.happens(self.world.faults.zombie)
        tasks = self.tasks

        def end() -> None:
            for task in tasks:
                task.kill()

        self.world.after(self.world.chance.uniform(5.0, 60.0) if lives_on else 0.0, end)
        self.world.after(self.world.chance.uniform(0.2, 5.0), self.start)

    def restart(self) -> None:
        """Begin again after an error that ends the process."""
        self.world.after(self.world.chance.uniform(0.2, 2.0), self.start)

    async def main(self) -> None:
        raise NotImplementedError


class Environment(Program):
    """An environment with items: it leases them by the SDK's own code, rolls them out and submits their groups."""

    def __init__(self, simulation: Simulation, name: str, group_size: int) -> None:
        self.name = name
        self.group_size = group_size
        super().__init__(simulation)

    async def main(self) -> None:
        simulation, request = self.simulation, self._request()
        registered = await simulation.call(lambda broker: broker.register_environment(request))
        environment = registered.environment_id
        running: set[LeasedItem] = set()

        async def ask(asked: ItemRequest) -> ItemLease:
            return await simulation.call(lambda broker: broker.lease_items(environment, asked))  # type: ignore[no-any-return]

        leases = ItemLeases(ask, limit=simulation.limits[self.name] if simulation.limits is not None else None)
        while True:
            pacing = await simulation.call(lambda broker: broker.heartbeat(environment))
            while pacing.state == "run" and (len(running) + 1) * self.group_size <= pacing.room_sequences:
                if len(running) >= 8 or (item := await leases.take()) is None:
                    break
                running.add(item)
                self.spawn(self._roll_out(environment, item, leases, running))
            if pacing.state == "finished":
                await leases.close()
                await simulation.call(lambda broker: broker.register_environment(request))
            await sleep(self.world, self.world.chance.uniform(0.05, 0.5))

    def _request(self) -> EnvironmentRequest:
        return EnvironmentRequest(name=self.name, group_size=self.group_size, max_token_length=64)

    async def _roll_out(self, environment: int, item: LeasedItem, leases: ItemLeases, running: set[LeasedItem]) -> None:
        chance = self.world.chance
        await sleep(
            self.world, chance.uniform(10.0, 60.0) if chance.random() < 0.01 else chance.lognormvariate(-1.0, 1.0)
        )
        if chance.random() < 0.03 and self.simulation.limits is None:
            leases.drop(item, "timed-out")
        else:
            (key,) = leases.keys(item, 1)
            await self._submit(environment, item, key)
            leases.acknowledge(item)
        running.discard(item)

    async def _submit(self, environment: int, item: LeasedItem, key: GroupKey) -> None:
        simulation = self.simulation
        ident = simulation.ident_of(item.run_id, environment, item.number)
        group = CheckedGroup(
            text=(TEMPLATE % ident).encode(),
            size=self.group_size,
            token_count=self.group_size,
            env_id=environment,
            oldest_version=None,
        )
        await simulation.call(lambda broker: broker.submit(environment, [group], key=key.key, run_id=item.run_id))


@dataclass
class TrainerDisk:
    """The content of a trainer's run directory."""

    name: str
    checkpoint: int = 0
    version: int = 0
    """The newest version whose publish was begun."""
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups of the batches that the checkpoint covers."""
    finished: bool = False


class Trainer(Program):
    """A trainer: it takes numbered batches, publishes, checkpoints every third step, and commits."""

    CHECKPOINT_EVERY = 3

    def __init__(self, simulation: Simulation) -> None:
        self.disk = TrainerDisk(name="run-1")
        self.called_at = 0.0
        super().__init__(simulation)

    async def main(self) -> None:
        disk = self.disk
        try:
            if disk.finished:
                self.simulation.run_number += 1
                self.disk = disk = TrainerDisk(name=f"run-{self.simulation.run_number}", version=disk.version)
            await self._train(disk)
        except (SupersededRun, BatchOutOfOrder, CommittedBatch, PolicyNotNewer, NoOpenRun):
            if disk is self.disk and not disk.finished:  # another process has taken over, or it must resume
                await sleep(self.world, 30.0)
                return
        self.restart()

    async def _train(self, disk: TrainerDisk) -> None:
        simulation = self.simulation
        info: RunInfo = await simulation.call(lambda broker: self._begin(broker, disk))
        run_id, epoch = info.run_id, info.epoch
        trained = {n: groups for n, groups in disk.trained.items() if n <= disk.checkpoint}
        highest = max(info.highest_policy_version, disk.version)
        for number in range(disk.checkpoint + 1, simulation.steps + 1):
            trained[number] = await self._take(run_id, epoch, number)
            await sleep(self.world, self.world.chance.uniform(0.05, 0.4))
            await self._respect_holds(run_id, epoch)
            highest += 1
            disk.version = max(disk.version, highest)
            update = PolicyUpdate(
                run_id=run_id, epoch=epoch, version=highest, step=number, published_at=self.world.wall_clock()
            )
            await simulation.call(lambda broker, update=update: self._publish(broker, update))
            if number % self.CHECKPOINT_EVERY == 0 or number == simulation.steps:
                await self._checkpoint(disk, run_id, epoch, number, trained)
        await simulation.call(lambda broker: self._finish(broker, disk, run_id, epoch))

    def _begin(self, broker: Broker, disk: TrainerDisk) -> RunInfo:
        info = broker.begin_run(
            RunRequest(
                name=disk.name,
                batch_size=self.simulation.batch_size,
                max_token_length=64,
                num_steps=self.simulation.steps,
                resume=True,
                take_over=True,
                resume_from_batch=disk.checkpoint,
                checkpoint_interval=self.CHECKPOINT_EVERY,
                max_staleness=self.simulation.max_staleness,
            )
        )
        self.simulation.oracle.granted(info.run_id, info.epoch)
        return info

    async def _take(self, run_id: str, epoch: int, number: int) -> tuple[int, ...]:
        while True:
            taken = await self.simulation.call(lambda broker: self._get(broker, run_id, epoch, number))
            self.called_at = self.world.now
            if taken is not None:
                return taken  # type: ignore[no-any-return]
            await sleep(self.world, 0.1)

    def _get(self, broker: Broker, run_id: str, epoch: int, number: int) -> tuple[int, ...] | None:
        rows = broker.get_batch(number, run_id=run_id, epoch=epoch)
        if rows is None:
            return None
        idents = tuple(_ident_decoder.decode(body).tokens[0][0] for body in broker.read_bodies(rows))
        self.simulation.oracle.acted(run_id, epoch, f"a request for batch {number}")
        self.simulation.oracle.handed_out(run_id, number, idents)
        for ident in idents:
            run = self.simulation.run_of(ident)
            self.simulation.oracle.require(run == run_id, f"batch {number} of {run_id} has a group of {run}")
        return idents

    async def _respect_holds(self, run_id: str, epoch: int) -> None:
        for _ in range(20):
            state = await self.simulation.call(lambda broker: broker.policy_state(run_id, epoch))
            if not state.held_seconds:
                return
            await sleep(self.world, min(0.5, state.held_seconds))

    def _publish(self, broker: Broker, update: PolicyUpdate) -> None:
        broker.update_policy(update)
        assert update.run_id is not None
        assert update.epoch is not None
        self.simulation.oracle.acted(update.run_id, update.epoch, f"version {update.version}")
        self.simulation.oracle.published(update.version, update.step)

    async def _checkpoint(
        self, disk: TrainerDisk, run_id: str, epoch: int, number: int, trained: dict[int, tuple[int, ...]]
    ) -> None:
        """Write a checkpoint, which a run directory takes from its newest process alone, and commit it."""
        if disk is not self.disk or self.simulation.oracle.epochs[run_id] != epoch:
            raise SupersededRun("another process writes the run directory now")
        disk.checkpoint, disk.trained = number, dict(trained)
        await self.simulation.call(lambda broker: self._commit(broker, run_id, epoch, number))

    def _commit(self, broker: Broker, run_id: str, epoch: int, number: int) -> None:
        broker.commit(number, run_id=run_id, epoch=epoch)
        self.simulation.oracle.acted(run_id, epoch, f"the commit of batch {number}")

    def _finish(self, broker: Broker, disk: TrainerDisk, run_id: str, epoch: int) -> None:
        broker.finish_run(run_id, epoch=epoch)
        self.simulation.oracle.acted(run_id, epoch, "the end")
        if not disk.finished:
            disk.finished = True
            limits = self.simulation.limits
            self.simulation.oracle.finished(
                run_id,
                disk.trained,
                at=self.world.now,
                steps=self.simulation.steps,
                items=None if limits is None else sum(limits.values()),
                counted=sum(
                    row.outcomes.groups.get("trained", 0)
                    for row in broker.state.environments
                    if row.outcomes.run_id == run_id
                ),
            )


class Rival(Program):
    """A second trainer, started by accident: it must be refused while the first is at work."""

    def __init__(self, simulation: Simulation, trainer: Trainer) -> None:
        self._trainer = trainer
        super().__init__(simulation)

    async def main(self) -> None:
        request = RunRequest(name="rival", batch_size=4, max_token_length=64, num_steps=1)
        while True:
            await sleep(self.world, self.world.chance.expovariate(1 / 60.0))
            if self.world.now - self._trainer.called_at > 5.0 or self._trainer.disk.finished:
                continue
            try:
                await self.simulation.network.call(
                    self.simulation.process.serve(lambda broker: self._begin(broker, request))
                )
            except BrokerError:
                continue

    def _begin(self, broker: Broker, request: RunRequest) -> None:
        run = broker.state.runs.open
        if run is None or broker.state.clock() - run.trainer_seen_at > 10.0:
            return
        try:
            broker.begin_run(request)
        except RunInProgress:
            return
        self.simulation.oracle.require(False, "a second trainer took the run of one that is at work")


class Evaluation(Program):
    """An evaluation that holds the policy now and then, and is told if another version came all the same."""

    async def main(self) -> None:
        simulation, chance = self.simulation, self.world.chance
        while True:
            await sleep(self.world, chance.expovariate(1 / 15.0))
            try:
                hold = await simulation.call(lambda broker: broker.holds.hold(HoldRequest(seconds=3.0)))
                await sleep(self.world, chance.uniform(0.1, 2.5))
                released = await simulation.call(lambda broker, hold=hold: broker.holds.release(hold.hold_id))
            except (NoOpenRun, UnknownHold, UnknownEnvironment):
                continue
            simulation.oracle.require(
                not released.kept or released.policy_version == hold.policy_version,
                f"an evaluation of {hold.policy_version} was told that it was kept, and got {released.policy_version}",
            )
