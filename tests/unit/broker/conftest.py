"""Fixtures for the broker's rules: a broker in memory, a manual clock, groups identified by their first token."""

import msgspec
import pytest

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.broker.v0 import AtroposContract, LegacyRegistration
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest
from atropos_api.wire.group_json import check_group, decode_fields


class BrokerScene:
    """A broker and the actions of its callers."""

    def __init__(self, **settings):
        self.now = 1000.0
        own = {name: settings.pop(name) for name in ("key_memory_seconds",) if name in settings}
        self.settings = type("Settings", (BrokerSettings,), own)(**settings)
        self.store = MemoryLedger(), MemoryBodyLog()
        self.restart()

    def restart(self):
        self.inner = Broker(*self.store, settings=self.settings, clock=lambda: self.now, monotonic=lambda: self.now)
        self.legacy = AtroposContract(self.inner)

    @property
    def counters(self):
        return self.inner.state.counters

    def begin(self, **options):
        defaults = {"name": "run", "batch_size": 8, "max_token_length": 64, "num_steps": 0, "take_over": True}
        self.info = self.inner.begin_run(RunRequest(**(defaults | options)))
        return self.info

    def register(self, name="env", group_size=4, **options):
        request = EnvironmentRequest(name=name, group_size=group_size, max_token_length=64, **options)
        return self.inner.register_environment(request).environment_id

    def send(self, env, *idents, size=4, version=None, key=None, run_id=None):
        groups = [self.fields(ident, size, version) for ident in idents]
        return self.inner.submit(env, [check_group(fields, env_id=env) for fields in groups], key=key, run_id=run_id)

    def fields(self, ident, size=4, version=None, env_id=0):
        group = make_group(size, 2, first_token=ident * 1000, version=version, env_id=env_id)
        return decode_fields(msgspec.json.encode(group))

    def batch(self, number, **options):
        rows = self.inner.get_batch(number, **options)
        return None if rows is None else self.idents(rows)

    def idents(self, rows):
        return [msgspec.json.decode(body)["tokens"][0][0] // 1000 for body in self.inner.read_bodies(rows)]

    def publish(self, version, step, servers=None):
        update = PolicyUpdate(
            run_id=self.info.run_id, version=version, step=step, published_at=self.now, servers=servers
        )
        return self.inner.update_policy(update)

    def register_trainer(self, batch_size=8, **options):
        defaults = {"wandb_group": "group", "wandb_project": "project", "max_token_len": 64, "checkpoint_dir": ""}
        defaults |= {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10}
        self.legacy.register(LegacyRegistration(batch_size=batch_size, **(defaults | options)))

    def leave_trainer_silent(self):
        """Pass the time until the trainer no longer counts as at work, long before it counts as gone."""
        self.now += 31

    def room(self, env):
        return self.inner.heartbeat(env).room_sequences


@pytest.fixture
def broker(request):
    return BrokerScene(**getattr(request, "param", {}))
