"""After any events in any order, the broker hands out the same batches as the naive reference, on every store."""

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from atropos_api.store.directory import open_directory
from atropos_api.store.factory import open_store
from atropos_api.testing import RedisServer, running_redis


def load(name):
    """Import a module next to this file, as tests are not a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for name in ("brute_force", "reference", "expected_repeats"):
    load(name)
BrokerMachine = load("broker_machine").BrokerMachine

EXAMPLES = int(os.environ.get("ATROPOS_PROPERTY_EXAMPLES", "40"))
STEPS = int(os.environ.get("ATROPOS_PROPERTY_STEPS", "40"))


class DurableMachine(BrokerMachine):
    """Machine on the durable store: after a kill the next process finds what the kernel had at that moment."""

    def open_store(self):
        self.directory = Path(tempfile.mkdtemp(prefix="atropos-machine-"))
        self.ledgers = []
        return self.reopen_store()

    def reopen_store(self):
        place = self.directory / str(len(self.ledgers))
        if self.ledgers:
            shutil.copytree(self.directory / str(len(self.ledgers) - 1), place)
        ledger, bodies = open_directory(place, fsync="never", fresh=False)
        self.ledgers.append(ledger)
        return ledger, bodies

    def teardown(self):
        for ledger in getattr(self, "ledgers", []):
            with contextlib.suppress(Exception):
                ledger.close()
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)


class RedisMachine(BrokerMachine):
    url = ""

    def open_store(self):
        return open_store(self.url, fresh=True)

    def reopen_store(self):
        self.close_store()
        return open_store(self.url)

    def close_store(self):
        self.bodies.close()
        self.ledger.close()

    def teardown(self):
        if hasattr(self, "ledger"):
            self.close_store()


def compare(machine, examples):
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=STEPS, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("machine", [BrokerMachine, DurableMachine])
def test_batches_are_those_of_the_naive_reference(machine):
    compare(machine, EXAMPLES if machine is BrokerMachine else max(10, EXAMPLES // 4))


@pytest.mark.skipif(not RedisServer.installed(), reason="redis-server is not installed")
def test_batches_are_those_of_the_naive_reference_over_redis():
    with running_redis() as server:
        RedisMachine.url = server.url
        compare(RedisMachine, max(5, EXAMPLES // 20))
