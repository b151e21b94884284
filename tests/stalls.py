"""Five stalls of a run, planted at a broker as trainer and environments cause them, each with the edge where it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from atropos_api.client import BrokerClient
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunInfo, RunRequest
from atropos_api.wire.reports import EnvironmentActivity, OpenRollout, ServerUse

SERVER = ServerUse(url="http://vllm:9001", open_requests=0, requests=10)


@dataclass
class Stalled:
    """A broker with one open run and one environment."""

    client: BrokerClient
    run: RunInfo
    environment: int

    def submit(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            self.client.submit(self.environment, [make_group(4, 6, first_token=number)], idempotency_key=f"k{number}")

    def publish(self, version: int, step: int) -> None:
        update = PolicyUpdate(run_id=self.run.run_id, version=version, step=step, published_at=1.0, epoch=1)
        self.client.update_policy(update)

    def report(self, **fields: object) -> None:
        put(self.client.url, f"/v1/environments/{self.environment}/activity", EnvironmentActivity(**fields))  # type: ignore[arg-type]

    @contextmanager
    def waiting(self, call: Callable[[BrokerClient], object]) -> Iterator[None]:
        """Make a long poll of the trainer, again and again, in a thread while the block runs."""
        stop = threading.Event()

        def poll() -> None:
            with BrokerClient(self.client.url, retry_seconds=0.0) as own:
                while not stop.is_set():
                    try:
                        call(own)
                    except Exception:
                        if not stop.is_set():
                            stop.wait(0.1)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(3)

    def waits_for_batch(self, number: int) -> object:
        return self.waiting(
            lambda own: own.get_batch(number, run_id=self.run.run_id, epoch=self.run.epoch, wait_seconds=1.0)
        )


def put(url: str, path: str, body: object) -> None:
    import msgspec

    response = httpx.put(url + path, content=msgspec.json.encode(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 204, response.text


@contextmanager
def stalled_run(client: BrokerClient, *, name: str = "stalled") -> Iterator[Stalled]:
    run = client.begin_run(RunRequest(name=name, batch_size=8, max_token_length=64, num_steps=100, take_over=True))
    request = EnvironmentRequest(name="gsm8k", group_size=4, max_token_length=64)
    stalled = Stalled(client, run, client.register_environment(request).environment_id)
    stalled.publish(1, 0)
    yield stalled


@contextmanager
def rollouts(stalled: Stalled) -> Iterator[None]:
    """The queue is nearly empty, the trainer waits, and inference is at work."""
    stalled.submit(1)
    stalled.report(open_rollouts=3, open_requests=12, servers=[SERVER])
    with stalled.waits_for_batch(1):  # type: ignore[attr-defined]
        yield


@contextmanager
def trainer(stalled: Stalled) -> Iterator[None]:
    """The trainer has taken a batch and works on it; as much is queued as may be."""
    stalled.submit(2)
    assert stalled.client.get_batch(1, run_id=stalled.run.run_id, epoch=stalled.run.epoch) is not None
    stalled.submit(6, first=10)
    yield


@contextmanager
def tool(stalled: Stalled) -> Iterator[None]:
    """Rollouts are open, and none of them asks inference for anything."""
    slow = OpenRollout(name="item 7", seconds=30.0, done=0, wanted=4, last_event="tool python", last_event_seconds=28.0)
    stalled.report(open_rollouts=5, open_requests=0, idle_seconds=28.0, slowest=[slow], servers=[SERVER])
    with stalled.waits_for_batch(1):  # type: ignore[attr-defined]
        yield


@contextmanager
def evaluation(stalled: Stalled) -> Iterator[None]:
    """An evaluation holds the policy, and the trainer waits to publish the next."""
    stalled.submit(2)
    assert stalled.client.get_batch(1, run_id=stalled.run.run_id, epoch=stalled.run.epoch) is not None
    stalled.client.hold_policy(60, reason="evaluation of gsm8k")
    with stalled.waiting(
        lambda own: own.get_policy(run_id=stalled.run.run_id, epoch=stalled.run.epoch, wait_seconds=1.0)
    ):
        yield


@contextmanager
def straggler(stalled: Stalled) -> Iterator[None]:
    """A group lacks one member for far longer than groups usually take, while others are at work."""
    slow = OpenRollout(
        name="Natalia sold clips", seconds=90.0, done=3, wanted=4, last_event="request", last_event_seconds=88.0
    )
    stalled.report(open_rollouts=1, open_requests=1, usual_seconds=6.0, slowest=[slow], servers=[SERVER])
    with stalled.waits_for_batch(1):  # type: ignore[attr-defined]
        yield


STALLS = {
    "rollouts": (rollouts, "inference-broker"),
    "trainer": (trainer, "broker-trainer"),
    "tool": (tool, "environment-inference"),
    "hold": (evaluation, "trainer-publish"),
    "straggler": (straggler, "inference-broker"),
}
"""Each rule, with the stall that it finds and the edge on which it lies."""
