"""The trainer fetches one batch ahead and no further, logs its waits, and stops quickly."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atropos_api.client import BrokerClient, RunSuperseded
from atropos_api.common import concurrency
from atropos_api.testing import served_broker
from atropos_api.wire import Batch, DropReport, EnvironmentRequest, RunRequest
from example_trainer import api
from example_trainer.api import BackgroundCall, BatchFeed, BrokerSession, write_batch
from example_trainer.errors import BatchTimeout, NotWritten


def make_feed(get_batch: Callable[[int], Batch | None], **settings: object) -> BatchFeed[int]:
    values: dict[str, object] = {
        "last": 10,
        "prefetch": True,
        "timeout_seconds": 30.0,
        "should_stop": lambda: False,
        "on_idle": lambda: None,
    }
    return BatchFeed(get_batch, lambda batch: batch.number, **(values | settings))  # type: ignore[arg-type]


def batch(number: int) -> Batch:
    return Batch(number=number, run_id="r", groups=[])


class Broker:
    """A broker that gives out batches at once and records the requested ones."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def get(self, number: int) -> Batch:
        self.asked.append(number)
        return batch(number)


def settle() -> None:
    time.sleep(0.1)


def test_r29_one_batch_is_fetched_ahead_and_no_more() -> None:
    broker = Broker()
    feed = make_feed(broker.get)
    assert feed.take(1) == 1
    settle()
    assert broker.asked == [1, 2]
    assert feed.take(2) == 2
    settle()
    assert broker.asked == [1, 2, 3]


def test_without_prefetch_a_batch_is_asked_for_when_it_is_needed() -> None:
    broker = Broker()
    feed = make_feed(broker.get, prefetch=False)
    feed.take(1)
    settle()
    assert broker.asked == [1]


def test_nothing_is_fetched_beyond_the_last_step() -> None:
    broker = Broker()
    feed = make_feed(broker.get, last=1)
    feed.take(1)
    settle()
    assert broker.asked == [1]


def test_an_empty_long_poll_is_asked_again() -> None:
    answers = [None, None, batch(1)]
    assert make_feed(lambda _: answers.pop(0), last=1).take(1) == 1


def test_a_stop_is_noticed_while_a_long_poll_hangs() -> None:
    release = threading.Event()

    def hang(_: int) -> None:
        release.wait(20)

    started = time.monotonic()
    feed = make_feed(hang, should_stop=lambda: True)
    assert feed.take(1) is None
    assert time.monotonic() - started < 2
    feed.close()
    release.set()


def test_waiting_is_said_and_what_needs_doing_meanwhile_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(concurrency, "WAIT_LINE_SECONDS", 0.3)
    monkeypatch.setattr(api, "IDLE_SECONDS", 0.1)
    idle: list[int] = []
    release = threading.Event()

    def late(number: int) -> Batch:
        release.wait(20)
        return batch(number)

    def on_idle() -> None:
        idle.append(1)
        if len(idle) == 4:
            release.set()

    with caplog.at_level(logging.INFO):
        assert make_feed(late, last=1, on_idle=on_idle).take(1) == 1
    assert "waiting for batch 1" in caplog.text


def test_environments_that_deliver_nothing_end_the_wait_with_a_hint() -> None:
    feed = make_feed(lambda _: time.sleep(0.05), timeout_seconds=0.3)
    with pytest.raises(BatchTimeout, match="--batch-timeout"):
        feed.take(1)
    feed.close()


def test_an_error_in_the_fetching_thread_reaches_the_loop() -> None:
    def broken(_: int) -> None:
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        make_feed(broken).take(1)


def test_a_background_call_hands_over_its_result_and_can_be_waited_for() -> None:
    call = BackgroundCall(lambda: 7, name="seven")
    assert call.wait(5)
    assert call.result() == 7


def test_a_trainer_that_was_taken_over_cannot_end_the_run_of_its_successor() -> None:
    request = RunRequest(name="run", batch_size=8, max_token_length=64, num_steps=10)
    with served_broker() as url, BrokerClient(url, retry_seconds=1.0) as client:
        first, second = BrokerSession(client), BrokerSession(client)
        first.begin(request)
        second.begin(RunRequest(name="run", batch_size=8, max_token_length=64, num_steps=10, resume=True))
        with pytest.raises(RunSuperseded):
            first.finish()
        assert client.status()["run"]["state"] == "open"
        second.finish()
        assert client.status()["run"]["state"] == "finished"


def test_a_wait_in_vain_repeats_what_environments_say_of_dropped_groups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(concurrency, "WAIT_LINE_SECONDS", 0.2)
    monkeypatch.setattr(api, "LONG_POLL_SECONDS", 0.05)
    with served_broker() as url, BrokerClient(url) as client:
        session = BrokerSession(client)
        session.begin(RunRequest(name="run", batch_size=8, max_token_length=64, num_steps=10))
        environment = client.register_environment(EnvironmentRequest(name="e", group_size=8, max_token_length=64))
        told = DropReport(session="s", groups={"equal-scores": 96}, explanation="96 groups collected, all dropped")
        client.report_dropped(environment.environment_id, told)
        feed = make_feed(session.get_batch, timeout_seconds=0.6, explain=session.explain_wait)
        with caplog.at_level(logging.INFO), pytest.raises(BatchTimeout, match="; e: 96 groups collected, all dropped"):
            feed.take(1)
        feed.close()
        settle()
    assert "e: 96 groups collected, all dropped" in caplog.text


def test_a_broker_that_is_gone_leaves_a_wait_without_a_hint() -> None:
    client = BrokerClient("http://127.0.0.1:9", retry_seconds=0.0)
    assert BrokerSession(client).explain_wait() == []
    client.close()


def test_a_batch_that_cannot_be_saved_is_named_with_the_flag_that_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file in the folder's place")
    path = tmp_path / "rollouts" / "batch-1.atb"
    with pytest.raises(NotWritten, match=rf"{path} cannot be written .*--save-batches.*--resume auto"):
        write_batch(path, Batch(number=1, run_id="r", groups=[]))
