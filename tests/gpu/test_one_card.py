"""Trainer and server on one card: a publish during training, masters in host memory, and a server that is killed."""

from __future__ import annotations

from tests.gpu.sharing import find


def test_a_publish_on_its_own_stream_does_not_wait_for_the_step(report, record_claim):
    found = find("publish_beside_step", "1.5B")
    report(f"publish of {found['gigabytes']:.2f} GB beside a step", f"{found['aside'] * 1e3:.1f} ms")
    report("the same on the stream that trains", f"{found['same'] * 1e3:.1f} ms")
    record_claim("publish-side-stream", found["aside"] / found["same"])
    record_claim("publish-milliseconds", found["aside"] * 1e3)


def test_gradients_get_to_masters_in_host_memory_beside_the_backward(record_claim):
    record_claim("host-masters-step", find("gradients_to_host")["host"])


def test_a_killed_server_leaves_room_for_the_next(report, record_claim):
    found = find("killed_server")
    record_claim("memory-after-server-death", found["kept"])
    record_claim("successor-beside-mapping", found.get("successor", 0.0) == 1.0)
    read = {None: "ends the process", 0.0: "gives other values", 1.0: "gives its last values"}[found.get("read")]
    report("reading the memory of a server that was killed", read)
