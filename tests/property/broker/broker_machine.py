"""Drives the broker and the naive reference by the same steps, and compares them after each."""

import math

import expected_repeats
import hypothesis.strategies as st
import msgspec
import pytest
import reference
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.broker.v0 import AtroposContract, LegacyRegistration
from atropos_api.errors import (
    BatchOutOfOrder,
    CommittedBatch,
    PolicyNotNewer,
    RunInProgress,
    SupersededRun,
    UnusableGroupSize,
)
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest
from atropos_api.wire.group_json import check_group, decode_fields

SIZES = st.lists(st.sampled_from([1, 1, 2, 2, 3, 4]), min_size=1, max_size=4)
LAGS = st.sampled_from([None, 0, 0, 1, 3, -1])
NAMES = st.sampled_from(["a", "b"])
BATCH_SIZES = st.sampled_from([2, 4, 4, 5, 6])
UNITS = st.sampled_from(["sequences", "sequences", "groups"])
STRANGERS = [None, -1, 77]
PATIENCE_SECONDS = 30.0


def has_run(*, legacy):
    return precondition(lambda self: self.model.run is not None and self.model.run.legacy == legacy)


class PatientSettings(BrokerSettings):
    key_memory_seconds = 1e9


class BrokerMachine(RuleBasedStateMachine):
    """Environments submit over both contracts, trainers connect and disconnect, and the process is killed at times."""

    @initialize(
        max_staleness=st.sampled_from([None, None, 1, 2]),
        keep=st.sampled_from([0, 0, 2]),
        drop_orphaned=st.booleans(),
        contract=st.sampled_from(["v1", "v1", "atropos", "none"]),
        minima=st.sampled_from([(None, None), (None, 0.5), (0.5, 0.3), (0.8, 0.7)]),
    )
    def start(self, max_staleness, keep, drop_orphaned, contract, minima):
        self.settings = PatientSettings(
            max_staleness=max_staleness,
            max_uncommitted=4,
            keep_batches=keep,
            drop_orphaned=drop_orphaned,
            min_allocation_wait=PATIENCE_SECONDS,
        )
        limit = math.inf if max_staleness is None else max_staleness
        self.model = reference.Reference(limit, keep, drop_orphaned, PATIENCE_SECONDS)
        self.repeats = expected_repeats.ExpectedRepeats()
        self.now = self.model.now = 1000.0
        self.ident = self.version = self.since_begin = 0
        self.sent, self.posted, self.info = [], [], None
        self.ids = {}
        self.ledger, self.bodies = self.open_store()
        self.start_broker()
        for place, minimum in enumerate(minima):
            self.register(place, 2, minimum)
        self.since_begin = 9
        if contract == "v1":
            self.begin("a", 4, "sequences")
        elif contract == "atropos":
            self.register_trainer(4, "a")

    def open_store(self):
        return MemoryLedger(), MemoryBodyLog()

    def reopen_store(self):
        return self.ledger, self.bodies

    def start_broker(self):
        self.broker = Broker(self.ledger, self.bodies, settings=self.settings, clock=lambda: self.now)
        self.legacy = AtroposContract(self.broker)

    # Environments

    @rule(
        place=st.integers(0, 2), size=st.sampled_from([1, 2, 2, 4, 8]), minimum=st.sampled_from([None, None, 0.5, 0.8])
    )
    def register(self, place, size, minimum):
        request = EnvironmentRequest(
            name=f"env {place}", group_size=size, max_token_length=99, min_batch_allocation=minimum
        )
        if self.model.run and self.model.run.unit == "sequences" and size > self.model.run.size:
            with pytest.raises(UnusableGroupSize):
                self.broker.register_environment(request)
            return
        env = self.broker.register_environment(request).environment_id
        assert self.ids.setdefault(place, env) == env
        self.model.register(env, size, minimum)

    @rule(place=st.integers(0, 1))
    def leave(self, place):
        self.broker.disconnect_environment(self.ids[place])
        self.model.envs[self.ids[place]].connected = False

    @rule(place=st.integers(0, 1))
    def give_a_sign_of_life(self, place):
        self.broker.heartbeat(self.ids[place])
        self.model.touch(self.ids[place])

    @rule(seconds=st.sampled_from([1, 29, 30, 31, 61, 61, 1000]))
    def pass_time(self, seconds):
        self.now += seconds
        self.model.now = self.now

    def make(self, env, sizes, lag):
        version = None if lag is None else max(0, self.version - lag)
        groups = []
        for size in sizes:
            self.ident += 1
            groups.append((self.ident, env, size, version))
        return groups

    def fields(self, groups):
        bodies = [make_group(size, 2, first_token=n * 100, version=v, env_id=env) for n, env, size, v in groups]
        return [decode_fields(msgspec.json.encode(body)) for body in bodies]

    @rule(place=st.integers(0, 1), sizes=SIZES, lag=LAGS, keyed=st.booleans())
    def submit(self, place, sizes, lag, keyed):
        groups = self.make(self.ids[place], sizes, lag)
        self.send(groups, f"key {self.ident}" if keyed else None)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def submit_again(self, data):
        self.send(*data.draw(st.sampled_from(self.sent)))

    def send(self, groups, key):
        self.since_begin += 1
        env = groups[0][1]
        checked = [check_group(fields, env_id=env) for fields in self.fields(groups)]
        answer = self.broker.submit(env, checked, key=key)
        assert answer.accepted == self.expect(groups, key and (env, key), always_alive=True)
        self.sent += [(groups, key)] if key else []

    @rule(data=st.data(), sizes=SIZES, lag=LAGS, answered=st.booleans())
    def post(self, data, sizes, lag, answered):
        env = data.draw(st.sampled_from([*self.ids.values(), *STRANGERS]))
        groups = self.make(env, sizes, lag)
        self.posted.append(groups)
        self.post_groups(groups, None, answered)

    @precondition(lambda self: self.posted)
    @rule(data=st.data(), keyed=st.sampled_from([False, False, False, True]), answered=st.booleans())
    def post_again(self, data, keyed, answered):
        groups = data.draw(st.sampled_from(self.posted[-4:]))
        self.post_groups(groups, "key of a post" if keyed else None, answered)

    def post_groups(self, groups, key, answered):
        self.since_begin += 1
        taken = self.legacy.take(self.fields(groups), key=key)
        self.legacy.settle(taken, arrived=answered)
        env = groups[0][1]
        accepted = self.expect(groups, key and (env, key), arrived=answered)
        assert (len(taken.rows), taken.duplicates) == (accepted, len(groups) - accepted)

    def expect(self, groups, key, *, always_alive=False, arrived=True):
        """Give the reference the groups that are not repeats; return their number."""
        fresh = self.repeats.fresh(groups, key, self.now)
        if fresh or always_alive:
            self.model.touch(groups[0][1])
        self.model.take(fresh)
        self.repeats.note(groups, fresh, key, arrived=arrived, now=self.now)
        return len(fresh)

    # Runs

    @precondition(lambda self: self.since_begin >= 5)
    @rule(name=NAMES, batch_size=BATCH_SIZES, unit=UNITS, take_over=st.booleans())
    def begin(self, name, batch_size, unit, take_over=True):
        """Begin a run; rarely, since that ends the state that the other rules have built."""
        self.since_begin = 0
        self.pass_time(0.001)  # before the model: a trainer is at work after 30 s without a request, not after 30.001 s
        run = self.model.run
        same = run is not None and not run.legacy and run.name == name
        if self.model.refuses_another() and not same and not take_over:
            with pytest.raises(RunInProgress):
                self.request(name, batch_size, unit, resume=False, point=0, take_over=False)
            return
        self.request(name, batch_size, unit, resume=False, point=0, take_over=take_over)
        self.model.begin(name, batch_size, unit)

    @has_run(legacy=False)
    @rule(data=st.data(), batch_size=BATCH_SIZES, unit=UNITS, same=st.booleans())
    def resume(self, data, batch_size, unit, same):
        run = self.model.run
        self.resume_run(data, run, *((run.size, run.unit) if same else (batch_size, unit)))

    @precondition(lambda self: self.model.run is None or self.since_begin >= 4)
    @rule(data=st.data(), name=NAMES)
    def resume_any(self, data, name):
        namesakes = [run for run in self.model.runs if run.name == name and not run.legacy]
        if namesakes:
            run = next((run for run in namesakes if run.state == "open"), namesakes[-1])
            self.resume_run(data, run, run.size, run.unit)

    def resume_run(self, data, run, batch_size, unit):
        point = data.draw(st.integers(max(0, run.committed - 3), max([run.committed, *run.batches]) + 1))
        self.pass_time(0.001)
        self.request(run.name, batch_size, unit, resume=True, point=point)
        self.model.resume(run, batch_size, unit, point)
        assert self.info.epoch == run.epoch

    def request(self, name, batch_size, unit, *, resume, point, take_over=True):
        request = RunRequest(name=name, batch_size=batch_size, max_token_length=99, num_steps=0, unit=unit)
        request.resume, request.resume_from_batch, request.take_over = resume, point, take_over
        self.info = self.broker.begin_run(request)
        assert self.info.next_batch == point + 1

    @precondition(lambda self: self.model.run is not None and self.since_begin >= 5)
    @rule()
    def finish(self):
        self.since_begin = 0
        run_id = self.broker.state.runs.require_open().run_id
        self.broker.finish_run(run_id)
        self.broker.finish_run(run_id)
        self.model.close("finished")

    @has_run(legacy=False)
    @rule(steps=st.integers(0, 2), again=st.sampled_from([False, False, True]))
    def publish(self, steps, again):
        run = self.model.run
        step = (run.step or 0) + steps
        if not again:
            self.version += 1
        known = run.steps.get(self.version)
        update = PolicyUpdate(run_id=self.info.run_id, version=self.version, step=step, published_at=self.now)
        self.model.call()
        if self.version < run.version and known != step:
            with pytest.raises(PolicyNotNewer):
                self.broker.update_policy(update)
            return
        for _ in range(2):
            self.broker.update_policy(update)
            self.model.policy(self.version, step)

    @has_run(legacy=False)
    @rule(ahead=st.integers(-2, 1))
    def ask(self, ahead):
        number = max(1, self.model.formed() + 1 + ahead)
        run = self.model.run
        self.model.call()
        try:
            rows = self.broker.get_batch(number, run_id=self.info.run_id, epoch=self.info.epoch)
        except CommittedBatch:
            assert number <= run.committed
            return
        except BatchOutOfOrder:
            assert number > min(self.model.formed() + 1, run.committed + self.settings.max_uncommitted)
            return
        assert self.idents(rows) == self.model.batch(number)
        if rows is not None:
            self.slices_partition(number, rows)

    @has_run(legacy=False)
    @rule(count=st.integers(1, 3))
    def ask_for_more(self, count):
        for _ in range(count):
            self.ask(0)

    def slices_partition(self, number, rows):
        """Check that each group goes whole to one rank, and that no rank has over one group more than another."""
        for world_size in (2, 3):
            ranks = [self.broker.get_batch(number, rank=rank, world_size=world_size) for rank in range(world_size)]
            assert sorted(row.seq for part in ranks for row in part) == [row.seq for row in rows]
            tokens = [sum(row.token_count for row in part) for part in ranks]
            assert max(tokens) - min(tokens) <= max(row.token_count for row in rows)

    def idents(self, rows):
        if rows is None:
            return None
        return [msgspec.json.decode(body)["tokens"][0][0] // 100 for body in self.broker.read_bodies(rows)]

    @precondition(lambda self: self.model.run and not self.model.run.legacy and self.model.run.batches)
    @rule(data=st.data())
    def commit(self, data):
        number = data.draw(st.sampled_from(sorted(self.model.run.batches)))
        self.broker.commit(number, run_id=self.info.run_id, epoch=self.info.epoch)
        self.model.call()
        self.model.commit(number)

    @has_run(legacy=False)
    @rule()
    def old_epoch_is_refused(self):
        with pytest.raises(SupersededRun):
            self.broker.get_batch(1, run_id=self.info.run_id, epoch=self.info.epoch - 1)

    # The Atropos contract

    @precondition(lambda self: self.since_begin >= 5)
    @rule(batch_size=BATCH_SIZES, group=NAMES, steps=st.sampled_from([0, 0, 2]))
    def register_trainer(self, batch_size, group, steps=0):
        run = self.model.run
        same = run is not None and run.legacy and run.name == group
        if self.model.refuses_another() and not same:
            with pytest.raises(RunInProgress):
                self.legacy.register(registration(batch_size, group, steps))
            return
        self.legacy.register(registration(batch_size, group, steps))
        if same and not (self.model.over(run) or self.model.gone(run)):
            run.size, run.delivered, run.heard = batch_size, False, self.now
            self.model.dissolve()
        else:
            self.since_begin = 0
            self.model.begin(group, batch_size, legacy=True)
        self.model.run.total = steps

    @has_run(legacy=True)
    @rule(accepted=st.lists(st.booleans(), min_size=1, max_size=3))
    def poll(self, accepted):
        for delivered in accepted:
            handed = self.legacy.next_batch()
            assert self.idents(handed and handed[1]) == self.expect_next(delivered)
            if handed and delivered:
                self.legacy.confirm_delivery(handed[0].run_id, handed[0].handed_batch)

    def expect_next(self, delivered):
        """Expect that a poll commits the delivered batch and gets the next."""
        run = self.model.run
        self.model.call(named=False)
        if run.delivered:
            self.model.commit(run.handed)
        found = self.model.batch(run.committed + 1)
        if found:
            run.handed, run.delivered = run.committed + 1, delivered
        return found

    @precondition(lambda self: self.since_begin >= 5)
    @rule()
    def reset(self):
        self.since_begin = 0
        self.legacy.reset()
        if self.model.run is None:
            self.model.homeless = []
        self.model.close("closed")
        for env in self.model.envs.values():
            env.connected = False

    @rule()
    def kill(self):
        self.ledger, self.bodies = self.reopen_store()
        self.start_broker()
        self.model.blocked_since = None
        self.repeats.restart(self.rows(), self.now)
        for env in self.model.envs.values():
            env.seen = self.now
        if self.model.run is not None:
            # Not every call of a trainer is recorded.
            row = self.broker.state.runs.open
            assert row.trainer_seen_at == self.now or self.now - row.trainer_seen_at > 900
            self.model.run.heard, self.model.run.longest = row.trainer_seen_at, row.longest_silence_seconds

    def rows(self):
        """Return all that the reference stores."""
        places = [rows for run in self.model.runs for rows in (run.queue, *run.batches.values())]
        return [row for rows in (self.model.homeless, *places) for row in rows]

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "model"):
            return
        state, run = self.broker.state, self.model.run
        queue = self.model.homeless if run is None else run.queue
        assert (state.queue.groups, state.queue.sequences) == (len(queue), sum(row.size for row in queue))
        batched = [*state.batches.values(), *state.replayable.values(), *state.left_over.values()]
        assert state.queue.groups + sum(map(len, batched)) == len(self.rows())
        if run is not None:
            assert sorted(state.batches) == [number for number in sorted(run.batches) if number > run.committed]
            assert self.broker.outstanding_sequences(state.runs.open) == self.model.outstanding()


def registration(batch_size, group, steps):
    return LegacyRegistration(
        wandb_group=group,
        wandb_project="project",
        batch_size=batch_size,
        max_token_len=99,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=steps,
    )
