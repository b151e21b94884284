"""Whatever happens in whatever order, the broker hands out the batches of the naive reference, on every store."""

import contextlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.errors import BatchOutOfOrder, CommittedBatch, SupersededRun
from atropos_api.store.directory import open_directory
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest
from atropos_api.wire.payload import check_group, decode_fields

_spec = importlib.util.spec_from_file_location("broker_reference", Path(__file__).with_name("reference.py"))
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

EXAMPLES = int(os.environ.get("ATROPOS_PROPERTY_EXAMPLES", "60"))
SIZES = [1, 2, 3, 4]


class BrokerMachine(RuleBasedStateMachine):
    """Environments 0 and 1 submit, one trainer trains, the process dies now and then."""

    durable = False

    @initialize(max_staleness=st.sampled_from([None, None, 1, 2]), early=st.integers(0, 3))
    def start(self, max_staleness, early):
        self.directory = Path(tempfile.mkdtemp(prefix="atropos-machine-")) if self.durable else None
        self.settings = BrokerSettings(max_staleness=max_staleness, max_uncommitted=4)
        self.now = 1000.0
        self.crashes = 0
        self.stores = []
        self.open_store()
        self.model = reference.Reference(max_staleness, SIZES)
        self.ident = 0
        self.version = 0
        self.runs = 0
        self.info = None
        self.submissions = 0
        for name in ("one", "two"):
            request = EnvironmentRequest(name=name, group_size=1, max_token_length=99)
            self.broker.register_environment(request)
        if early:
            self.begin(4)

    def open_store(self):
        if self.durable:
            self.ledger, self.bodies = open_directory(self.directory / str(self.crashes), fsync="never", fresh=False)
        elif not self.stores:
            self.ledger, self.bodies = MemoryLedger(), MemoryBodyLog()
        self.stores.append(self.ledger)
        self.broker = Broker(self.ledger, self.bodies, settings=self.settings, clock=lambda: self.now)

    @rule(
        groups=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(SIZES)), min_size=2, max_size=7),
        lag=st.sampled_from([None, 0, 0, 1, 3]),
    )
    def submit(self, groups, lag):
        self.submissions += 1
        for env, size in groups:
            self.ident += 1
            version = None if lag is None or self.info is None else max(0, self.version - lag)
            self.send(self.ident, env, size, version)

    @precondition(lambda self: self.ident > 0)
    @rule(data=st.data())
    def submit_again(self, data):
        ident = data.draw(st.integers(1, self.ident))
        self.send(ident, *self.sent[ident])

    def send(self, ident, env, size, version):
        self.sent = getattr(self, "sent", {})
        self.sent[ident] = (env, size, version)
        body = msgspec.json.encode(make_group(size, 2, first_token=ident * 100, version=version))
        answer = self.broker.submit(env, [check_group(decode_fields(body), env_id=env)], key=f"key-{ident}")
        assert answer.accepted == self.model.submit(ident, env, size, version, f"key-{ident}")

    @precondition(lambda self: self.submissions >= 5)
    @rule(batch_size=st.sampled_from([2, 4, 5, 6]))
    def begin(self, batch_size):
        """Rarely, for it ends what the other rules have built up."""
        self.submissions = 0
        self.runs += 1
        self.request(f"run {self.runs}", batch_size, resume=False, point=0)
        self.model.begin(f"run {self.runs}", batch_size)

    @precondition(lambda self: self.model.run is not None and self.model.run["batches"])
    @rule(data=st.data(), batch_size=st.sampled_from([None, None, 4, 6]))
    def resume(self, data, batch_size):
        self.resume_run(data, batch_size, self.model.run["name"])

    @precondition(lambda self: self.runs > 1)
    @rule(data=st.data())
    def resume_any(self, data):
        self.resume_run(data, None, f"run {data.draw(st.integers(1, self.runs))}")

    def resume_run(self, data, batch_size, name):
        run = self.model.runs[name]
        formed = max([run["committed"], *run["batches"]])
        point = data.draw(st.integers(max(0, run["committed"] - 1), formed))
        batch_size = batch_size or run["size"]
        self.request(name, batch_size, resume=True, point=point)
        self.model.resume(name, batch_size, point)
        assert self.info.epoch == self.model.run["epoch"]

    def request(self, name, batch_size, *, resume, point):
        self.info = self.broker.begin_run(
            RunRequest(
                name=name,
                batch_size=batch_size,
                max_token_length=99,
                num_steps=0,
                resume=resume,
                resume_from_batch=point,
            )
        )
        assert self.info.next_batch == point + 1

    @precondition(lambda self: self.model.run is not None)
    @rule(steps=st.integers(0, 2))
    def publish(self, steps):
        self.version += 1
        step = (self.model.run["step"] or 0) + steps
        update = PolicyUpdate(run_id=self.info.run_id, version=self.version, step=step, published_at=self.now)
        self.broker.update_policy(update)
        self.broker.update_policy(update)
        self.model.policy(self.version, step)

    @precondition(lambda self: self.model.run is not None)
    @rule(ahead=st.integers(-2, 1))
    def ask(self, ahead):
        run = self.model.run
        formed = max([run["committed"], *run["batches"]])
        self.ask_for(max(1, formed + 1 + ahead))

    @precondition(lambda self: self.model.run is not None and self.model.run["queue"])
    @rule(count=st.integers(1, 3))
    def ask_for_more(self, count):
        for _ in range(count):
            self.ask(0)

    def ask_for(self, number):
        run = self.model.run
        formed = max([run["committed"], *run["batches"]])
        try:
            rows = self.broker.get_batch(number, run_id=self.info.run_id, epoch=self.info.epoch)
        except CommittedBatch:
            assert number <= run["committed"]
            return
        except BatchOutOfOrder:
            assert number > min(formed + 1, run["committed"] + self.settings.max_uncommitted)
            return
        expected = self.model.batch(number)
        found = None if rows is None else [ident_of(body) for body in self.broker.read_bodies(rows)]
        assert found == (None if expected is None else [row[0] for row in expected])

    @precondition(lambda self: self.model.run is not None and self.model.run["batches"])
    @rule(data=st.data())
    def commit(self, data):
        number = data.draw(st.sampled_from(sorted(self.model.run["batches"])))
        self.broker.commit(number, run_id=self.info.run_id, epoch=self.info.epoch)
        self.model.commit(number)

    @precondition(lambda self: self.model.run is not None)
    @rule()
    def old_epoch_is_refused(self):
        with pytest.raises(SupersededRun):
            self.broker.get_batch(1, run_id=self.info.run_id, epoch=self.info.epoch - 1)

    @rule()
    def kill(self):
        """What the kernel has at this moment is what the next process finds."""
        if self.durable:
            self.crashes += 1
            shutil.copytree(self.directory / str(self.crashes - 1), self.directory / str(self.crashes))
        self.open_store()

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "model"):
            return
        queue = self.model.run["queue"] if self.model.run else self.model.pending
        assert self.broker.state.queue.groups == len(queue)
        assert self.broker.state.queue.sequences == sum(row[2] for row in queue)

    def teardown(self):
        for ledger in getattr(self, "stores", []):
            with contextlib.suppress(Exception):
                ledger.close()
        if getattr(self, "directory", None):
            shutil.rmtree(self.directory)


class DurableMachine(BrokerMachine):
    durable = True


def ident_of(body):
    return msgspec.json.decode(body)["tokens"][0][0] // 100


@pytest.mark.parametrize("machine", [BrokerMachine, DurableMachine])
def test_batches_are_those_of_the_naive_reference(machine):
    budget = EXAMPLES if machine is BrokerMachine else max(10, EXAMPLES // 4)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=budget, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
