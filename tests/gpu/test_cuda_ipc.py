"""One copy of the weights is shared by two torch processes on a GPU, as the shared mode requires.

A second process owns fused tensors and has captured a CUDA graph over them; this one maps them by IPC
handles and publishes into them. vLLM itself is not needed.
"""

from __future__ import annotations

import time

import pytest
import torch

from tests.gpu.exporter import digest
from tests.gpu.sharing import LARGE, SMALL, ExporterProcess, publish, random_masters


@pytest.fixture
def exporter():
    made = []

    def start(shape=SMALL, **environment):
        made.append(ExporterProcess(shape, **environment))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_captured_graph_computes_with_the_published_weights_bit_for_bit(exporter, record_claim):
    server = exporter()
    before = server.ask("replay")
    segment, views = server.attach()
    publish(views, random_masters(views), segment)
    after = server.ask("replay")
    same = after["replayed"] == after["eager"]
    record_claim("graph-reads-published", same and after["replayed"] != before["replayed"])


def test_views_are_unfused_slices_of_the_servers_memory(exporter):
    server = exporter()
    segment, views = server.attach()
    before = server.ask("checksum")
    hidden = views["layers.0.qkv"].shape[1]
    views["layers.0.qkv"][hidden : 2 * hidden].add_(1)
    segment.synchronise()
    after = server.ask("checksum")
    assert {name for name in before if before[name] != after[name]} == {"layers.0.qkv"}


def test_attaching_a_model_adds_no_copy_of_it(exporter, report, record_claim):
    server = exporter(LARGE)
    nbytes = server.ask("size")["nbytes"]
    free_before = torch.cuda.mem_get_info()[0]
    started = time.perf_counter()
    _, views = server.attach()
    seconds = time.perf_counter() - started
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert sum(view.nbytes for view in views.values()) == nbytes
    record_claim("one-copy", taken / nbytes)
    own = server.ask("memory")["nbytes"]
    report(f"attach to {nbytes / 1e9:.2f} GB", f"{seconds * 1e3:.1f} ms")
    report("memory of the process that owns them, of the weights", f"{own / nbytes:.3f}")


def test_a_publish_runs_at_the_speed_of_a_cast_in_one_process(exporter, report, record_claim, seconds_of):
    server = exporter(LARGE)
    segment, views = server.attach()
    masters = random_masters(views)
    written = sum(view.nbytes for view in views.values())
    rate = written / seconds_of(lambda: publish(views, masters, segment)) / 1e9
    own = {name: torch.empty_like(view) for name, view in views.items()}
    cast = written / seconds_of(lambda: publish(own, masters, segment)) / 1e9
    copied = written / seconds_of(lambda: publish(own, views, segment)) / 1e9
    report(f"publish of {written / 1e9:.2f} GB of bf16 from fp32", f"{rate:.0f} GB/s written")
    report("the same cast within one process", f"{cast:.0f} GB/s written")
    report("a copy of bf16 out of the shared memory", f"{copied:.0f} GB/s written")
    record_claim("publish-bandwidth", rate / cast)


def test_the_masters_survive_the_death_of_the_server(exporter, record_claim):
    server = exporter()
    _, views = server.attach()
    masters = random_masters(views)
    sums = {name: master.double().sum().item() for name, master in masters.items()}
    server.kill()
    again = exporter()
    segment, fresh = again.attach()
    publish(fresh, masters, segment)
    whole = {name: master.double().sum().item() for name, master in masters.items()} == sums
    served = {name: digest(view) for name, view in fresh.items()} == again.ask("checksum")
    answer = again.ask("replay")
    record_claim("masters-survive", whole and served and answer["replayed"] == answer["eager"])
    del views
