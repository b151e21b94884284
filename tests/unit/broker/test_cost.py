"""Limits on the broker's cost, in calls instead of time: payload stays text, and queues may be long."""

import json
import sys
import time
import tracemalloc
from collections import Counter

import pytest

from atropos_api.broker import Broker
from atropos_api.broker.v0 import AtroposContract, LegacyEnvironment, LegacyRegistration
from atropos_api.http.streaming import coalesce
from atropos_api.store.directory import open_directory
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.wire import json_arrays
from atropos_api.wire.group_json import check_group, decode_fields


def group_text(size, length):
    tokens = [[7000 + place for place in range(length)] for _ in range(size)]
    logprobs = [
        [1.0] + [-1.25e-05 if place % 3 else -0.6931471824645996 for place in range(length - 1)] for _ in tokens
    ]
    values = {"tokens": tokens, "masks": tokens, "scores": [0.5] * size, "inference_logprobs": logprobs, "env_id": 0}
    return json.dumps(values).encode()


def contract_over(ledger, bodies):
    contract = AtroposContract(Broker(ledger, bodies))
    contract.register(
        LegacyRegistration(
            wandb_group="", wandb_project="", batch_size=64, max_token_len=64, checkpoint_dir="",
            save_checkpoint_interval=0, starting_step=0, num_steps=0,
        )
    )  # fmt: skip
    contract.next_batch()
    contract.register_environment(LegacyEnvironment(max_token_length=64, desired_name="env", weight=1.0, group_size=4))
    return contract


def fill(contract, fields, count, first=0):
    for number in range(first, first + count):
        contract.take([fields], key=str(number))


def calls_of(function):
    """Return the number of functions, Python's and C's, that run until this one returns."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_no_number_of_a_large_group_becomes_an_object(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("decoded")

    text = group_text(8, 2048)
    fields = decode_fields(text)
    for name in ("_judge_rows", "_decoded_lengths", "_exponents_fit", "_loads"):
        monkeypatch.setattr(json_arrays, name, refuse)
    group = check_group(fields)
    assert (group.size, group.token_count) == (8, 8 * 2048)
    for key in ("tokens", "inference_logprobs"):
        assert bytes(fields[key]) in group.text


def test_taking_a_large_group_costs_a_fraction_of_decoding_it():
    text = group_text(8, 2048)

    def cpu_seconds(function):
        best = float("inf")
        for _ in range(7):
            began = time.process_time()
            function()
            best = min(best, time.process_time() - began)
        return best

    assert 4 * cpu_seconds(lambda: check_group(decode_fields(text))) < cpu_seconds(lambda: json.dumps(json.loads(text)))


@pytest.mark.parametrize("ask", [lambda contract: contract.status.status_env(0), AtroposContract.next_batch])
def test_polls_and_batches_cost_the_same_however_long_the_queue(ask):
    fields = decode_fields(group_text(4, 2))
    contract = contract_over(MemoryLedger(), MemoryBodyLog())
    fill(contract, fields, 100)
    short = calls_of(lambda: ask(contract))
    fill(contract, fields, 5_000, first=100)
    long = calls_of(lambda: ask(contract))
    assert long <= 1.2 * short + 20


def test_large_bodies_are_sent_as_they_are_kept():
    large, small = bytes(1 << 20), b","
    pieces = list(coalesce([small, large, small, small, large, small]))
    assert [piece is large for piece in pieces] == [False, True, False, True, False]
    assert b"".join(pieces) == b"".join([small, large, small, small, large, small])


def test_a_submission_costs_four_statements_and_little_memory(tmp_path):
    ledger, bodies = open_directory(tmp_path, fsync="never", fresh=False)
    contract = contract_over(ledger, bodies)
    fields = decode_fields(group_text(4, 2))
    fill(contract, fields, 10)
    contract.status.status_env(0)
    statements = []
    ledger._db.set_trace_callback(statements.append)
    fill(contract, fields, 100, first=10)
    words = Counter(" ".join(statement.split()[:3]) for statement in statements)
    assert words == {
        "BEGIN IMMEDIATE": 100,
        "INSERT INTO groups": 100,
        "INSERT OR REPLACE": 100,  # the key
        "COMMIT": 100,
    }
    ledger._db.set_trace_callback(None)
    tracemalloc.start()
    fill(contract, fields, 3_000, first=110)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown / 3_000 < 2048
    bodies.close()
    ledger.close()
