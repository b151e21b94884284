"""`kill -9` of a trainer at every step of a publish, with the real bridge, header and fence, but without vLLM.

The server decodes meanwhile. In every case each token is of the version stamped on it, and the server either serves a
whole version or refuses until the next trainer has published.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from example_trainer.errors import ServerRefused
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weights.testing import served_fake

from .dying_trainer import variant

BEGIN, END = "/bridge/publish/begin", "/bridge/publish/end"
AT_THE_SERVER = {
    "begin arrives": (BEGIN, "request"),
    "begin is answered": (BEGIN, "answer"),
    "end arrives": (END, "request"),
    "end is answered": (END, "answer"),
}
"""Steps at which the trainer is killed from outside, while the server handles its request."""
OLD = ("begin arrives", "begin is answered", "begun")
TORN = ("header stamped", "half written", "written")
NEW = ("header whole", "end arrives", "end is answered", "ended")
PROMPT, OUTPUT_TOKENS = [5, 17, 9, 33], 48


class Trainer:
    """The parent process of the publishing trainers: each publish runs in a fork, which may be killed."""

    def __init__(self, model, fake):
        script = Path(__file__).parent / "dying_trainer.py"
        command = [sys.executable, str(script), str(model), fake.url, str(fake.server.manifest_path)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._server = fake.server
        assert self._process.stdout.readline() == "ready\n"

    def publish(self, version, masters="fp32", point="none"):
        """Publish in a new process; return how that process ended, once the server has handled its last request.

        A `begin` that was sent by a killed process and handled later would be in the way of the next publish.
        """
        child, handled = Future(), threading.Event()
        killed_at = AT_THE_SERVER.get(point)

        def kill(path, moment):
            if killed_at == (path, moment):
                os.kill(child.result(10), signal.SIGKILL)
            if killed_at == (path, "request") and moment == "answer":
                handled.set()

        self._server.on_exchange = kill
        self._process.stdin.write(f"{version} {masters} {point}\n")
        self._process.stdin.flush()
        child.set_result(int(self._process.stdout.readline()))
        exit_code = int(self._process.stdout.readline())
        assert killed_at is None or killed_at[1] == "answer" or handled.wait(30)
        return exit_code

    def close(self):
        self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Sampling:
    """A client that requests rollouts without a pause and records the answers and refusals."""

    def __init__(self, url, workers=1):
        self.samples, self.refusals, self.errors = [], set(), []
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(workers)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def ask(self, client):
        request = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": OUTPUT_TOKENS}
        try:
            self.samples.append(client._call("POST", "/generate", request, timeout_seconds=20.0))
        except ServerRefused as refused:
            self.refusals.add(refused.kind)
            time.sleep(0.02)

    def _run(self):
        client = ServerClient(self._url)
        try:
            while not self._stop.wait(0.02):
                self.ask(client)
        except Exception as error:
            self.errors.append(error)
        client.close()


@pytest.fixture
def fake(tiny_qwen2, tmp_path):
    with served_fake(tiny_qwen2, tmp_path, step_tokens=4, step_seconds=0.004) as served:
        yield served


@pytest.fixture
def trainer(tiny_qwen2, fake):
    trainer = Trainer(tiny_qwen2, fake)
    yield trainer
    trainer.close()


def test_r41_killed_at_any_step_of_a_publish_a_trainer_leaves_a_whole_version_or_a_server_that_refuses(
    fake, reference, trainer
):
    """Either it has masters of its own, or the served weights are the masters and change before the publish."""
    client = ServerClient(fake.url)
    served = version = 1
    assert trainer.publish(served) == 0
    with Sampling(fake.url) as load:
        for masters, point in itertools.product(("fp32", "none"), (*OLD, *TORN, *NEW)):
            case, torn, version = f"{masters}, {point}", point in TORN, version + 1
            assert trainer.publish(version, masters, point) == -signal.SIGKILL, case
            fake.server.wait_until_lapsed()
            info = client.info()
            served = version if point in NEW else served
            assert (info.policy_version, info.torn, info.paused) == (served, torn, torn), case
            if torn:
                served = version = version + 1
                load.ask(client)
                assert trainer.publish(served, masters) == 0, case
            load.ask(client)
        served = version + 1
        assert trainer.publish(served) == 0
        load.ask(client)
    client.close()
    assert load.errors == []
    assert load.refusals == {"weights-torn"}
    judge(reference, load.samples, served)


def judge(reference, samples, last):
    """Check that each token's logprob is that of the version stamped on it, and of no other."""
    versions = {span[2] for sample in samples for span in sample["policy_versions"][0]}
    assert last in versions
    assert len(versions) >= len(NEW) + len(TORN)
    for version in sorted(versions):
        chosen = [
            (sample, start, end)
            for sample in samples
            for start, end, stamped in sample["policy_versions"][0]
            if stamped == version
        ][:10]
        reference.model.load_state_dict(variant(reference.base, version))
        tokens = torch.tensor([[*PROMPT, *sample["token_ids"][0]] for sample, _, _ in chosen])
        with torch.no_grad():
            computed = (
                reference.model(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
            )
        for (sample, start, end), row in zip(chosen, computed[:, len(PROMPT) - 1 :], strict=True):
            told = torch.tensor(sample["logprobs"][0][start:end])
            assert (told - row[start:end]).abs().max() <= 1e-4, version
