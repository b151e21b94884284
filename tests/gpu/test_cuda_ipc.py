"""One copy of the weights between two torch processes on a GPU: what the shared mode stands on there.

A second process owns fused tensors and has captured a CUDA graph over them; this one maps them by IPC
handles and publishes into them. vLLM itself takes no part: it is not at hand where these run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from example_trainer.weight_protocol.segment import make_segment
from example_trainer.weights.tensor_map import Place, view_at

SMALL = (2, 256, 512)
LARGE = (28, 1536, 8960)  # the shape of a 1.5B model
SHARING_REFUSED = re.compile(r"expandable|IPC|pidfd|shar(e|ing)|not supported", re.IGNORECASE)
"""Words with which torch and CUDA say that memory of an allocator cannot be shared."""


class ExporterProcess:
    def __init__(self, shape, **environment):
        repository = Path(__file__).resolve().parents[2]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("exporter.py")), *map(str, shape)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(repository), **environment},
        )

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait(30)
            self.errors.seek(0)
            lines = [line for line in self.errors.read().splitlines() if line.strip()]
            raise RuntimeError(f"the exporter ended when asked to {command}: {lines[-1] if lines else 'no error'}")
        return json.loads(answer)

    def attach(self):
        exported = self.ask("export")
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        segment = make_segment(uuid)
        storages = {each["id"]: segment.attach(each["handle"]) for each in exported["storages"]}
        return segment, {
            name: view_at(storages[storage], Place(storage, offset, tuple(shape), tuple(stride)), torch.bfloat16)
            for name, (storage, offset, shape, stride) in exported["placements"].items()
        }

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.process.wait(30)
        self.errors.close()


@pytest.fixture
def exporter():
    made = []

    def start(shape=SMALL, **environment):
        made.append(ExporterProcess(shape, **environment))
        return made[-1]

    yield start
    for each in made:
        each.close()


def publish(views, masters, segment):
    for name, master in masters.items():
        views[name].copy_(master, non_blocking=True)
    segment.synchronise()


def random_masters(views):
    return {name: torch.randn(view.shape, device="cuda") * view.shape[-1] ** -0.5 for name, view in views.items()}


def digest(tensor):
    """Return the digest of a tensor, in the form that the exporter reports for its own tensors."""
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def test_a_captured_graph_computes_with_the_published_weights_bit_for_bit(exporter, report):
    server = exporter()
    before = server.ask("replay")
    segment, views = server.attach()
    publish(views, random_masters(views), segment)
    after = server.ask("replay")
    same = after["replayed"] == after["eager"]
    report("a captured graph after a publish, to a fresh forward", "bit-equal" if same else "another", "bit-equal")
    assert same
    assert after["replayed"] != before["replayed"]


def test_views_are_unfused_slices_of_the_servers_memory(exporter):
    server = exporter()
    segment, views = server.attach()
    before = server.ask("checksum")
    hidden = views["layers.0.qkv"].shape[1]
    views["layers.0.qkv"][hidden : 2 * hidden].add_(1)
    segment.synchronise()
    after = server.ask("checksum")
    assert {name for name in before if before[name] != after[name]} == {"layers.0.qkv"}


def test_attaching_a_model_adds_no_copy_of_it(exporter, report):
    server = exporter(LARGE)
    nbytes = server.ask("size")["nbytes"]
    free_before = torch.cuda.mem_get_info()[0]
    started = time.perf_counter()
    _, views = server.attach()
    seconds = time.perf_counter() - started
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert sum(view.nbytes for view in views.values()) == nbytes
    assert taken < 0.1 * nbytes
    own = server.ask("memory")["nbytes"]
    report(f"attach to {nbytes / 1e9:.2f} GB", f"{seconds * 1e3:.1f} ms")
    report("memory that attaching takes, of the weights", f"{taken / nbytes:.3f}", "below 0.1")
    report("memory of the process that owns them, of the weights", f"{own / nbytes:.3f}")


def test_a_publish_runs_at_the_speed_of_a_cast_in_one_process(exporter, report, seconds_of):
    server = exporter(LARGE)
    segment, views = server.attach()
    masters = random_masters(views)
    written = sum(view.nbytes for view in views.values())
    rate = written / seconds_of(lambda: publish(views, masters, segment)) / 1e9
    own = {name: torch.empty_like(view) for name, view in views.items()}
    cast = written / seconds_of(lambda: publish(own, masters, segment)) / 1e9
    copied = written / seconds_of(lambda: publish(own, views, segment)) / 1e9
    report(f"publish of {written / 1e9:.2f} GB of bf16 from fp32", f"{rate:.0f} GB/s written", "half of the next row")
    report("the same cast within one process", f"{cast:.0f} GB/s written")
    report("a copy of bf16 out of the shared memory", f"{copied:.0f} GB/s written")
    assert rate >= 0.5 * cast


def test_the_masters_survive_the_death_of_the_server(exporter, report):
    server = exporter()
    _, views = server.attach()
    masters = random_masters(views)
    sums = {name: master.double().sum().item() for name, master in masters.items()}
    server.kill()
    again = exporter()
    segment, fresh = again.attach()
    publish(fresh, masters, segment)
    assert {name: master.double().sum().item() for name, master in masters.items()} == sums
    assert again.ask("replay")["replayed"] == again.ask("replay")["eager"]
    report("masters after the server's death", "whole, and published to its successor", "whole")
    del views


def test_expandable_segments_are_shared_whole_or_refused_with_torchs_own_reason(exporter, report):
    """A handle must not map other memory: weights published there would not reach the server, without any error."""
    exporter().attach()  # without them sharing works on this machine, so that a refusal below is about them
    server = exporter(SMALL, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    before = server.ask("checksum")
    refusal = None
    try:
        segment, views = server.attach()
    except RuntimeError as error:
        refusal = str(error)
    if refusal is not None:
        report("export with expandable_segments", f"fails: {refusal.splitlines()[0]}", "works, or fails so")
        assert SHARING_REFUSED.search(refusal), "ended for another reason"
        return
    publish(views, random_masters(views), segment)
    after = server.ask("checksum")
    report("export with expandable_segments", "works", "works, or is refused")
    assert after == {name: digest(view) for name, view in views.items()}
    assert all(after[name] != before[name] for name in before)
    answer = server.ask("replay")
    assert answer["replayed"] == answer["eager"]
