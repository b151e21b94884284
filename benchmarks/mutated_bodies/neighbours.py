"""A trainer and two environments at work, which remember what they sent and time every call."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence

import httpx
import msgspec

from atropos_api.client import BrokerClient
from atropos_api.wire import EnvironmentRequest, Group, RunInfo, RunRequest

GROUP_SIZE = 4
BATCH_SIZE = 32
SUBMIT_SECONDS = 0.03
POLL_SECONDS = 0.02
MARK = "neighbour"


class Neighbours:
    """The neighbours' groups by number (`sent`, `received`), and start and duration of their `calls`."""

    def __init__(self, url: str) -> None:
        self.sent: dict[int, Group] = {}
        self.received: dict[int, list[Group]] = {}
        self.calls: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self._url = url
        self._numbers = itertools.count(1)
        self._rng = random.Random(1)
        self._producing = threading.Event()
        self._training = threading.Event()
        self._producing.set()
        self._training.set()
        with BrokerClient(url) as client:
            run = client.begin_run(RunRequest(name="beside", batch_size=BATCH_SIZE, max_token_length=999, num_steps=0))
            request = EnvironmentRequest(name="honest", group_size=GROUP_SIZE, max_token_length=999)
            self._environment = client.register_environment(request).environment_id
        producers = [self._submit, self._submit_legacy, self._poll]
        self._producers = [threading.Thread(target=self._guard, args=(work,), daemon=True) for work in producers]
        self._trainer = threading.Thread(target=self._guard, args=(lambda: self._train(run),), daemon=True)
        for thread in (*self._producers, self._trainer):
            thread.start()

    def stop(self) -> None:
        """Stop producing, let the trainer take all that is left, and stop it too."""
        self._producing.clear()
        for thread in self._producers:
            thread.join()
        with BrokerClient(self._url) as client:
            deadline = time.monotonic() + 30
            while self.sent.keys() - self.received.keys() and time.monotonic() < deadline:
                # Fillers, so that the last groups find enough others for a batch.
                client.submit(self._environment, [make_group(self._rng)], idempotency_key=f"f{next(self._numbers)}")
                time.sleep(0.01)
        self._training.clear()
        self._trainer.join()

    def lost(self) -> list[int]:
        return sorted(self.sent.keys() - self.received.keys())

    def altered(self) -> list[int]:
        """Return the groups that came back altered, or more than once."""
        wrong = []
        for number, groups in self.received.items():
            wanted = self.sent.get(number)
            if wanted is None or [strip(group) for group in groups] != [strip(wanted)]:
                wrong.append(number)
        return wrong

    def p99(self, stretches: Sequence[tuple[float, float]]) -> float:
        """Return the p99 in seconds of the calls that began in one of the periods."""
        taken = sorted(
            seconds for began, seconds in self.calls if any(since <= began < until for since, until in stretches)
        )
        return taken[int(len(taken) * 0.99)]

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - any failure of a neighbour is reported
            self.failures.append(repr(error))

    def _submit(self) -> None:
        with BrokerClient(self._url, retry_seconds=0) as client:
            while self._producing.is_set():
                number, group = self._next()
                self._time(lambda: client.submit(self._environment, [group], idempotency_key=f"n{number}"))  # noqa: B023
                time.sleep(SUBMIT_SECONDS)

    def _submit_legacy(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while self._producing.is_set():
                _, group = self._next()
                body = msgspec.json.encode(group)
                self._time(lambda: client.post("/scored_data", content=body).raise_for_status())  # noqa: B023
                time.sleep(SUBMIT_SECONDS)

    def _poll(self) -> None:
        with BrokerClient(self._url, retry_seconds=0) as client:
            while self._producing.is_set():
                self._time(lambda: client.heartbeat(self._environment))
                time.sleep(POLL_SECONDS)

    def _train(self, run: RunInfo) -> None:
        number = run.next_batch
        with BrokerClient(self._url, retry_seconds=0) as client:
            while self._training.is_set():
                batch = client.get_batch(number, run_id=run.run_id, epoch=run.epoch, wait_seconds=0.5)
                if batch is None:
                    continue
                for group in batch.groups:
                    if isinstance(group.group_overrides, dict) and MARK in group.group_overrides:
                        self.received.setdefault(group.group_overrides[MARK], []).append(group)
                client.commit(number, run_id=run.run_id, epoch=run.epoch)
                number += 1

    def _next(self) -> tuple[int, Group]:
        number = next(self._numbers)
        group = make_group(self._rng)
        group.group_overrides = {MARK: number}
        self.sent[number] = group
        return number, group

    def _time(self, call: Callable[[], object]) -> None:
        began = time.monotonic()
        call()
        self.calls.append((began, time.monotonic() - began))


def make_group(rng: random.Random, length: int = 64) -> Group:
    """Return a group whose numbers are exact in every wire format."""
    tokens = [[rng.randrange(50_000) for _ in range(length)] for _ in range(GROUP_SIZE)]
    return Group(
        tokens=tokens,
        masks=[[-100] * (length // 3) + row[length // 3 :] for row in tokens],
        scores=[rng.randrange(9) / 8 for _ in range(GROUP_SIZE)],
        inference_logprobs=[[-rng.randrange(1, 4096) / 1024 for _ in range(length)] for _ in range(GROUP_SIZE)],
        messages=[[{"role": "user", "content": "Größe \u2028 \U0001f600"}] for _ in range(GROUP_SIZE)],
    )


def strip(group: Group) -> Group:
    """Return the group without the fields that the broker adds."""
    return msgspec.structs.replace(group, env_id=None, received_version=None)
