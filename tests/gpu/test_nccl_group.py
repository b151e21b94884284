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

# Rank 0 of two, whose other member never comes, or comes to the store and is gone before NCCL connects: the wait has to
# end at its limit, and the process goes on.
ALONE = """
import sys, threading, time, torch
from datetime import timedelta
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup, Rendezvous
from example_trainer.weight_protocol.transfer import make_store
address, port, comes = "127.0.0.1", int(sys.argv[1]), sys.argv[2] == "comes"
def come():
    make_store(address, port, world_size=2, is_master=False, timeout=timedelta(seconds=20)).set("member/1", "here")
if comes:
    threading.Thread(target=come, daemon=True).start()
try:
    BroadcastGroup(Rendezvous(address, port, 0, 2, "nccl"), torch.device("cuda"), timeout_seconds=5)
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
    starts = [[sys.executable, "-c", ALONE, str(free_port()), member] for member in ("never", "comes")]
    ended = [
        subprocess.run(start, capture_output=True, text=True, timeout=50, check=False, cwd=ROOT) for start in starts
    ]
    texts = [each.stdout + each.stderr[-2000:] for each in ended]
    goes_on = [each.returncode == 0 and "told:" in each.stdout and "alive 3.0" in each.stdout for each in ended]
    record_claim("nccl-abort", all(goes_on))
    assert all(goes_on), texts
