"""A process leaves and aborts the broadcast group over the real NCCL without ending."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from example_trainer.weight_protocol.broadcast_group import BroadcastGroup, Rendezvous
from example_trainer.weight_protocol.buckets import Bucket

ROOT = Path(__file__).resolve().parents[2]
BUCKET = Bucket((("w", [1 << 20], "float32"),))

# Rank 0 of two, whose other member never comes: the wait has to end at its limit, and the process goes on.
ALONE = """
import sys, time, torch
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup, Rendezvous
from example_trainer.weight_protocol.buckets import Bucket
bucket = Bucket((("w", [1024], "float32"),))
device = torch.device("cuda")
group = BroadcastGroup(Rendezvous("127.0.0.1", int(sys.argv[1]), 0, 2, "nccl"), device, timeout_seconds=5)
try:
    group.send([bucket], lambda _: bucket.empty(device))
except RuntimeError as error:
    print("told:", error)
time.sleep(5)  # a watchdog would end the process in this time
print("alive", float(torch.ones(3, device="cuda").sum()))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_one_rank_sends_a_bucket_and_leaves() -> None:
    device = torch.device("cuda")
    group = BroadcastGroup(Rendezvous("127.0.0.1", free_port(), 0, 1, "nccl"), device)
    buffer = BUCKET.empty(device).fill_(7)
    assert len(group.send([BUCKET], lambda _: buffer)) == 32
    group.close()
    assert int(buffer.sum(dtype=torch.int64)) == 7 * buffer.numel(), "the device still works after the abort"


def test_a_member_that_is_gone_ends_the_wait_and_not_the_process(record_claim: Any) -> None:
    command = [sys.executable, "-c", ALONE, str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    goes_on = ended.returncode == 0 and "told:" in ended.stdout and "alive 3.0" in ended.stdout
    record_claim("nccl-abort", goes_on)
    assert goes_on, ended.stderr[-4000:]
