"""Streams and devices of a publish on a GPU, by the order of the calls that torch gets; none runs here."""

from __future__ import annotations

import base64
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from example_trainer.config import TrainingConfig
from example_trainer.modeling.side_streams import SideStream
from example_trainer.state import Phases, Progress
from example_trainer.step.post_step import PostStep
from example_trainer.weight_protocol.segment import make_segment
from example_trainer.weights.base import PublishReport
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import config_of

DEFAULT, SIDE = "default stream", "side stream"


class RecordingCuda:
    """Records the calls that order work on a GPU; the names are those of `torch.cuda`."""

    def __init__(self):
        self.calls = []
        self.entered = DEFAULT

    def note(self, *call):
        self.calls.append(call)

    def stream_named(self, name, device):
        return SimpleNamespace(
            name=name,
            synchronize=lambda: self.note("wait for", name, str(device)),
            wait_event=lambda event: self.note("wait in", name, event.name),
        )

    def Stream(self, device, priority=0):
        self.note("make", SIDE, str(device), priority)
        return self.stream_named(SIDE, device)

    def Event(self):
        return SimpleNamespace(name="event", record=lambda stream: self.note("record in", stream.name))

    def current_stream(self, device):
        return self.stream_named(self.entered, device)

    @contextmanager
    def stream(self, stream):
        self.entered = stream.name
        yield
        self.entered = DEFAULT

    def synchronize(self, device=None):
        self.note("wait for everything", str(device))

    def set_device(self, device):
        self.note("set device", str(device))

    def device_count(self):
        return 2

    def get_device_properties(self, index):
        return SimpleNamespace(uuid=f"GPU-{index}")


@pytest.fixture
def cuda(monkeypatch):
    recording = RecordingCuda()
    names = ("Stream", "Event", "current_stream", "stream", "synchronize", "set_device")
    for name in (*names, "device_count", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(recording, name))
    return recording


def handle_on(gpu):
    blank = base64.b64encode(b"").decode()
    numbers = {"size_bytes": 0, "offset_bytes": 0, "counter_offset": 0, "event_required": False}
    return {"gpu_uuid": gpu, "memory": blank, "counter": blank, "event": blank, **numbers}


def test_a_publish_waits_for_the_gpu_that_holds_the_shared_tensors(cuda, monkeypatch):
    """`--vllm-gpu 1`: the views lie on GPU 1 while the process's current device is 0."""
    opened = []
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda index, *_: opened.append(index))
    segment = make_segment("GPU-1")
    segment.synchronise()
    assert cuda.calls == [], "nothing is mapped yet"
    segment.attach(handle_on("GPU-1"))
    segment.attach(handle_on("GPU-1"))
    segment.synchronise()
    assert (opened, cuda.calls) == ([1, 1], [("wait for", DEFAULT, "cuda:1")])


@pytest.mark.parametrize(("device", "set_to"), [("cuda:1", [("set device", "cuda:1")]), ("cpu", [])])
def test_the_trainers_current_gpu_is_that_of_the_shared_tensors_before_the_policy_is_loaded(
    cuda, monkeypatch, device, set_to
):
    bridge = SharedVllmBridge(config_of("http://localhost:1", "m"))
    attachment = SimpleNamespace(device=torch.device(device), manifest=SimpleNamespace(dtype="torch.bfloat16"))
    monkeypatch.setattr(bridge, "_attach", lambda: attachment)

    def load(*_, **__):
        cuda.note("load")
        raise InterruptedError

    monkeypatch.setattr("example_trainer.weights.shared_vllm.load_policy", load)
    with pytest.raises(InterruptedError):
        bridge.prepare()
    assert cuda.calls == [*set_to, ("load",)]


def test_work_beside_a_step_waits_for_what_came_before_it_and_not_for_what_came_after(cuda):
    side = SideStream(torch.device("cuda", 1))
    for _ in range(2):
        context = side.after_present_work()
        cuda.note("the next micro-batch")
        with context:
            cuda.note("work in", cuda.entered)
    once = [("wait in", SIDE, "event"), ("work in", SIDE), ("wait for", SIDE, "cuda:1")]
    made = ("make", SIDE, "cuda:1", -1)
    first = [("record in", DEFAULT), made, ("the next micro-batch",), *once]
    assert cuda.calls == [*first, ("record in", DEFAULT), ("the next micro-batch",), *once]


def test_on_a_cpu_nothing_is_asked_of_a_gpu(cuda):
    with SideStream(torch.device("cpu")).after_present_work():
        pass
    assert cuda.calls == []


@pytest.mark.parametrize("overlaps", [True, False])
def test_an_overlapped_publish_runs_in_its_own_stream_and_waits_for_that_alone(cuda, tmp_path, monkeypatch, overlaps):
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *_: None)
    segment = make_segment("GPU-0")
    segment.attach(handle_on("GPU-0"))

    def publish(version):
        cuda.note("write in", cuda.entered)
        segment.synchronise()
        return PublishReport(version=version, seconds=0.0)

    config = TrainingConfig(
        model_name="m",
        weight_bridge_mode="shared_vllm",
        overlap_publish=overlaps,
        save_path=str(tmp_path),
        checkpoint_interval=5,
    )
    learner = SimpleNamespace(
        policy=SimpleNamespace(device=torch.device("cuda", 0)),
        objective=SimpleNamespace(state=dict),
        ranks=SimpleNamespace(on_main=lambda call: call()),
    )
    post_step = PostStep(
        config,
        Progress(step=1, weights_step=1),
        learner=learner,
        alignment=SimpleNamespace(published=lambda _: None),
        session=SimpleNamespace(
            info=SimpleNamespace(run_id="r", max_staleness=None),
            announce_policy=lambda *_: None,
            held_seconds=lambda *_: 0.0,
        ),
        bridge=SimpleNamespace(publish=publish, should_publish=lambda _: True),
        phases=Phases(),
        should_stop=lambda: False,
    )
    post_step.start(1)
    post_step.join()
    stream = SIDE if overlaps else DEFAULT
    written = [("write in", stream), ("wait for", stream, "cuda:0")]
    assert [call for call in cuda.calls if call[0] in ("write in", "wait for", "wait for everything")] == (
        [*written, ("wait for", SIDE, "cuda:0")] if overlaps else written
    )
    assert (("wait in", SIDE, "event") in cuda.calls) is overlaps
