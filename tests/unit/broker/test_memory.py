"""The memory of a queued group is bounded, measured on a process of its own."""

import subprocess
import sys

import pytest

MEASURE = """
import gc, os, sys, tempfile
from pathlib import Path
import msgspec, psutil
from atropos_api.broker import Broker, BrokerSettings
from atropos_api.store.directory import open_directory
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest
from atropos_api.wire.group_json import check_group, decode_fields

FIRST, COUNT = 300, 2000
if sys.argv[1] == "memory":
    store = MemoryLedger(), MemoryBodyLog()
else:
    store = open_directory(Path(sys.argv[1]), fsync="never", fresh=False)
broker = Broker(*store, settings=BrokerSettings())
broker.register_environment(EnvironmentRequest(name="env", group_size=4, max_token_length=64))

def submit(ident):
    body = msgspec.json.encode(make_group(4, 64, first_token=1_000_000 + ident * 100))
    broker.submit(0, [check_group(decode_fields(body), env_id=0)], key=f"{ident:032x}")
    return len(body)

def resident():
    gc.collect()
    return psutil.Process().memory_info().rss

for ident in range(FIRST):
    submit(ident)
before = resident()
size = sum(submit(ident) for ident in range(FIRST, FIRST + COUNT))
print((resident() - before) / COUNT, size / COUNT)
broker.close()
"""


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_queued_group_costs_its_json_in_memory_and_next_to_nothing_in_a_directory(tmp_path, kind):
    place = "memory" if kind == "memory" else str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, place], capture_output=True, text=True, timeout=60, check=True
    )
    cost, size = map(float, result.stdout.split())
    assert cost <= (1.2 * size if kind == "memory" else 2048)
