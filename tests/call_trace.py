"""Counts the project's files that one request or one training step enters: `python tests/call_trace.py`.

Every Python call is recorded, in all threads. A submission and a batch go over a real socket to a broker with a store
in a directory; the training step runs on a tiny model, with a bridge that publishes to no server.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TRACED_STEP = 2
"""Number of the training step that is traced; the first one imports modules."""


class CallTrace:
    """Records the files below `folder` whose functions are called while `recording` is on."""

    def __init__(self, folder: str) -> None:
        self._prefix = str(ROOT / folder) + "/"
        self._recording = False
        self.files: dict[str, int] = {}

    def install(self) -> None:
        """Record the calls of this thread and of those that start later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]  # the stubs leave out that None takes it back
        sys.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._recording:
            name = frame.f_code.co_filename
            if name.startswith(self._prefix):
                short = name.removeprefix(self._prefix)
                self.files[short] = self.files.get(short, 0) + 1


def trace_broker(folder: Path) -> dict[str, list[str]]:
    """Return the broker's files entered by one submission and by one batch of a run of four sequences a batch."""
    from atropos_api.broker import Broker
    from atropos_api.client import BrokerClient
    from atropos_api.config import BrokerConfig
    from atropos_api.server.app import create_app
    from atropos_api.store.factory import open_store
    from atropos_api.testing import make_group, serve_in_thread
    from atropos_api.wire import EnvironmentRequest, RunRequest

    found = {}
    config = BrokerConfig(store=str(folder / "store"))
    ledger, bodies = open_store(config.store)
    trace = CallTrace("atropos_api")
    trace.install()
    try:
        app = create_app(config, Broker(ledger, bodies, settings=config))
        with serve_in_thread(app) as url, BrokerClient(url) as client:
            run = client.begin_run(RunRequest(name="traced", batch_size=4, max_token_length=64, num_steps=9))
            environment = client.register_environment(
                EnvironmentRequest(name="traced", group_size=4, max_token_length=64)
            )
            sys.setprofile(None)  # the client runs in this thread
            client.submit(environment.environment_id, [make_group()], idempotency_key="first")
            for name, call in (
                (
                    "submission",
                    lambda: client.submit(environment.environment_id, [make_group()], idempotency_key="traced"),
                ),
                ("batch", lambda: client.get_batch(1, run_id=run.run_id, epoch=run.epoch)),
            ):
                trace.files = {}
                with trace.recording():
                    call()
                found[name] = sorted(trace.files)
    finally:
        trace.remove()
        ledger.close()
        bodies.close()
    return found


def trace_training_step(folder: Path) -> list[str]:
    """Return the trainer's files entered by the second of three steps: its batch, the update, publish and log line."""
    from atropos_api.client import BrokerClient
    from atropos_api.testing import make_group, make_memory_app, serve_in_thread
    from atropos_api.wire import EnvironmentRequest
    from example_trainer.api import BrokerSession
    from example_trainer.cli import run_reporter, run_trackers
    from example_trainer.config import TrainingConfig
    from example_trainer.modeling.loading import policy_options
    from example_trainer.testing import LocalBridge, make_tiny_model
    from example_trainer.trainers import Trainer

    trace = CallTrace("example_trainer")

    class TracedTrainer(Trainer):
        def _step(self, step: int, feed: Any) -> bool:
            with trace.recording() if step == TRACED_STEP else nullcontext():
                return super()._step(step, feed)

    model = make_tiny_model(folder / "model")
    with serve_in_thread(make_memory_app()) as url, BrokerClient(url) as client:
        values = {"model_name": str(model), "dtype": "float32", "device": "cpu", "optimizer": "adamw", "seq_len": 64}
        steps = {"training_steps": TRACED_STEP + 1, "batch_size": 4, "gradient_accumulation_steps": 1}
        config = TrainingConfig.model_validate(values | steps | {"run_dir": folder / "run", "atropos_url": url})
        trainer = TracedTrainer(
            config,
            session=BrokerSession(client),
            bridge=LocalBridge(policy_options(config)),
            trackers=run_trackers(config),
            reporter=run_reporter(config),
        )
        trainer.set_up()
        environment = client.register_environment(EnvironmentRequest(name="e", group_size=4, max_token_length=64))
        for number in range(TRACED_STEP + 1):
            groups = [make_group(4, 6, first_token=number)]
            client.submit(environment.environment_id, groups, idempotency_key=str(number))
        trace.install()
        try:
            trainer.train()
        finally:
            trace.remove()
    return sorted(trace.files)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        traces = trace_broker(Path(folder)) | {"training step": trace_training_step(Path(folder))}
        for name, files in traces.items():
            sys.stdout.write(f"{name}: {len(files)} files\n  " + "\n  ".join(files) + "\n")


if __name__ == "__main__":
    main()
