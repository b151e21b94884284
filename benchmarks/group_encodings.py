"""Measures the processor time of a group in each form, and its ratio to the columns form in the same run.

No broker is started; it measures the steps in environment, broker and trainer that depend on the form.
`benchmarks/broker` measures whole brokers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import msgspec
import numpy as np

from atropos_api.http.content_negotiation import join_batch, read_submission
from atropos_api.wire import Batch, Group, Submission
from atropos_api.wire.columns_groups import columns_to_json, decode_batch, encode_submission, json_to_columns
from atropos_api.wire.group_json import finish_text
from atropos_api.wire.groups import Form
from example_trainer.data import DataSettings, prepare_batch
from example_trainer.objective.advantages import AdvantageSettings

Task = Callable[[], object]


def make_groups(count: int, size: int, length: int) -> list[Group]:
    generator = np.random.default_rng(0)
    prompt = length // 4
    groups = []
    for _ in range(count):
        tokens = (50_000 * generator.random((size, length)) ** 3).astype(int)
        masks = np.where(np.arange(length) < prompt, -100, tokens)
        logprobs = (-(generator.exponential(1.0, (size, length)) ** 3)).astype(np.float32)
        logprobs[:, :prompt] = 1.0
        group = Group(
            tokens=tokens.tolist(),
            masks=masks.tolist(),
            scores=[float(index) for index in range(size)],
            inference_logprobs=logprobs.astype(float).tolist(),
            policy_versions=[[(prompt, length, 1)]] * size,
        )
        groups.append(group)
    return groups


def take(body: bytes, form: Form) -> list[bytes]:
    _, groups = read_submission(body, form)
    return [finish_text(group, 1) for group in groups]


def take_typed(body: bytes) -> list[bytes]:
    return [msgspec.json.encode(group) for group in msgspec.json.decode(body, type=Submission).groups]


def deliver(stored: list[bytes], form: Form) -> bytes:
    return b"".join(join_batch(1, "run", stored, form))


def make_tasks(groups: list[Group]) -> list[tuple[str, str, Task]]:
    encoder = msgspec.json.Encoder()
    json_body = encoder.encode(Submission(environment_id=0, groups=groups))
    columns_body = encode_submission(0, groups)
    texts, records = take(json_body, "json"), take(columns_body, "columns")
    json_batch, columns_batch = deliver(texts, "json"), deliver(records, "columns")
    settings = DataSettings(max_tokens=1 << 20, advantages=AdvantageSettings(baseline="group", norm="none"))

    def train_from_json() -> object:
        return prepare_batch(msgspec.json.decode(json_batch, type=Batch), settings)

    return [
        ("broker", "columns in, columns out", lambda: deliver(take(columns_body, "columns"), "columns")),
        ("broker", "JSON in, JSON out", lambda: deliver(take(json_body, "json"), "json")),
        ("broker", "JSON in, JSON out, typed", lambda: deliver(take_typed(json_body), "json")),
        (
            "broker",
            "columns in, JSON out",
            lambda: deliver([columns_to_json(record) for record in take(columns_body, "columns")], "json"),
        ),
        (
            "broker",
            "JSON in, columns out",
            lambda: deliver([json_to_columns(text) for text in take(json_body, "json")], "columns"),
        ),
        ("environment", "encode columns", lambda: encode_submission(0, groups)),
        ("environment", "encode JSON", lambda: encoder.encode(Submission(environment_id=0, groups=groups))),
        ("trainer", "columns to tensors", lambda: prepare_batch(decode_batch(columns_batch, arrays=True), settings)),
        ("trainer", "columns to lists to tensors", lambda: prepare_batch(decode_batch(columns_batch), settings)),
        ("trainer", "JSON to tensors", train_from_json),
    ]


def measure(tasks: list[tuple[str, str, Task]], rounds: int) -> list[float]:
    """Return the least processor time of each task; they take turns, so that a busy machine affects all alike."""
    best = [float("inf")] * len(tasks)
    for _ in range(rounds):
        for index, (_, _, task) in enumerate(tasks):
            started = time.process_time_ns()
            task()
            best[index] = min(best[index], float(time.process_time_ns() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4, help="groups a body")
    parser.add_argument("--size", type=int, default=8, help="sequences a group")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    tasks = make_tasks(make_groups(options.groups, options.size, options.length))
    times = measure(tasks, options.rounds)
    print(f"{options.size} x {options.length}; processor time a group, against columns on the same side")
    base: dict[str, float] = {}
    for (side, name, _), spent in zip(tasks, times, strict=True):
        ratio = spent / base.setdefault(side, spent)
        print(f"  {side:12} {name:30} {spent / 1e6 / options.groups:8.3f} ms {ratio:8.1f} x")


if __name__ == "__main__":
    main()
