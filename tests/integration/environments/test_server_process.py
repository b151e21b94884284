"""The arithmetic server as a process of its own: it drains on SIGTERM, waits out restarts and leaves nothing behind."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

from atropos_api.client import BrokerClient
from atropos_api.testing import make_memory_app, served_broker
from atropos_api.wire.messages import PolicyUpdate, RunRequest
from environments.sdk.testing import FakeInference, sampled_tokens, served
from example_trainer.processes.ports import free_port


@contextmanager
def environment(inference, broker, tokenizer_folder, *flags):
    command = [
        *(sys.executable, "-m", "environments.arithmetic_server", "serve"),
        *("--openai.base_url", f"{inference}/v1", "--env.rollout_server_url", broker),
        *("--env.tokenizer_name", str(tokenizer_folder), "--no-env.eval_at_start", "--no-env.eval_at_end"),
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Trainer:
    """Takes batches through the blocking client, as a trainer does."""

    def __init__(self, url, *, steps):
        self.client = BrokerClient(url)
        self.run = self.client.begin_run(RunRequest(name="run", batch_size=32, max_token_length=512, num_steps=steps))
        self.publish(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def publish(self, step):
        self.client.update_policy(
            PolicyUpdate(
                run_id=self.run.run_id, version=step + 1, step=step, published_at=time.time(), epoch=self.run.epoch
            )
        )

    def step(self, number):
        batch = None
        while batch is None:
            batch = self.client.get_batch(number, run_id=self.run.run_id, epoch=self.run.epoch, wait_seconds=10)
        self.publish(number)
        self.client.commit(number, run_id=self.run.run_id, epoch=self.run.epoch)
        return batch

    def finish(self):
        self.client.finish_run(self.run.run_id, epoch=self.run.epoch)


def make_fake(**options):
    return FakeInference(lambda prompt, index: [index + 10] * 5 + [1], end=1, **options)


def test_the_server_exits_0_by_itself_when_the_run_is_finished(tokenizer_folder):
    with (
        served(make_fake()) as inference,
        served_broker() as broker,
        environment(inference, broker, tokenizer_folder) as process,
        Trainer(broker, steps=3) as trainer,
    ):
        for number in range(1, 4):
            trainer.step(number)
        trainer.finish()
        assert process.wait(timeout=20) == 0


def test_sigterm_drains_what_is_under_way_and_leaves_no_process(tokenizer_folder):
    fake = make_fake(delay_seconds=0.5)
    with served(fake) as inference, served_broker() as broker, Trainer(broker, steps=100) as trainer:
        with environment(inference, broker, tokenizer_folder) as process:
            wait_until(lambda: fake.in_flight > 0)
            under_way = fake.in_flight
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=15) == 0
            assert not [child for child in children if child.is_running()]
        batch = trainer.client.get_batch(1, run_id=trainer.run.run_id, epoch=trainer.run.epoch, wait_seconds=1)
        assert batch is not None
        assert len(batch.groups) <= under_way + 8


@pytest.mark.parametrize("begun", [False, True])
def test_sigterm_ends_a_server_that_waits_for_a_broker_that_is_gone(tokenizer_folder, begun):
    url = f"http://127.0.0.1:{(port := free_port())}"
    with environment("http://127.0.0.1:1", url, tokenizer_folder, "--env.drain_seconds", "2") as process:
        with served(make_memory_app(), port=port) as broker:
            wait_until(lambda: "registered" in process.stderr.readline())
            if begun:
                with Trainer(broker, steps=3):
                    time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=25) == 0


def test_a_restarted_inference_server_is_waited_for(tokenizer_folder):
    port = free_port()
    with (
        served_broker() as broker,
        Trainer(broker, steps=100) as trainer,
        environment(f"http://127.0.0.1:{port}", broker, tokenizer_folder) as process,
    ):
        numbers = iter(range(1, 10))
        for _ in range(3):
            with served(make_fake(), port=port):
                for _ in range(3):
                    trainer.step(next(numbers))
            time.sleep(0.3)
            assert process.poll() is None


@contextmanager
def durable_broker(port, folder):
    """`run-api` as a process of its own on a store in `folder`; it is killed at the end, as in a crash."""
    command = [sys.executable, "-m", "atropos_api", "--port", str(port), "--store", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_a_broker_that_is_killed_and_restarted_loses_and_doubles_no_group(tokenizer_folder, tmp_path):
    port, seen = free_port(), []
    fake = FakeInference(sampled_tokens(0, vocabulary=300, end=1), end=1)

    def take(trainer, numbers):
        for number in numbers:
            seen.extend(str(group.tokens) for group in trainer.step(number).groups)

    with served(fake) as inference, ExitStack() as stack:
        with durable_broker(port, tmp_path) as broker:
            wait_until(lambda: is_ready(broker))
            trainer = stack.enter_context(Trainer(broker, steps=100))
            process = stack.enter_context(environment(inference, broker, tokenizer_folder))
            take(trainer, range(1, 4))
        for first in (4, 7):
            with durable_broker(port, tmp_path):
                take(trainer, range(first, first + 3))
        assert process.poll() is None
    assert len(seen) == len(set(seen)) == 9 * 4


def is_ready(url):
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.TransportError:
        return False


def test_an_environment_may_be_started_before_everything_else(tokenizer_folder):
    """R33: each process waits for the others, in any order."""
    inference_port, broker_port = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in (inference_port, broker_port)]
    with environment(*urls, tokenizer_folder) as process:
        time.sleep(1.0)
        with served(make_memory_app(), port=broker_port) as broker:
            time.sleep(0.5)
            with Trainer(broker, steps=2) as trainer:
                time.sleep(0.5)
                with served(make_fake(), port=inference_port):
                    trainer.step(1)
                    trainer.step(2)
                    trainer.finish()
                    assert process.wait(timeout=20) == 0


def test_a_mistyped_broker_host_is_one_line_and_exit_code_2(tokenizer_folder):
    """R33: a name that does not resolve is distinguished from a broker that is not up yet."""
    with environment("http://127.0.0.1:1", "http://brokr.invalid:8000", tokenizer_folder) as process:
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 2
        assert "brokr.invalid" in stderr
        assert "Traceback" not in stderr


def wait_until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("did not come true in time")
        time.sleep(0.01)
