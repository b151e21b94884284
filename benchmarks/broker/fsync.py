"""Answers a second by `--fsync` mode, for one caller and for many at once, as a ratio to `never`.

    python -m benchmarks.broker.fsync [--seconds 5] [--callers 1 32]

The modes take turns, so that whatever else the machine does falls on all of them; the disk is that of the temporary
folder (`TMPDIR`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.broker.client import Client, new_key
from benchmarks.broker.drivers import JSON, register_legacy
from benchmarks.broker.servers import ROOMY, ours
from benchmarks.broker.workload import Shape, make_groups

MODES = ("never", "interval", "always")
SHAPE = Shape(4, 64, groups_per_batch=1000)
ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32])
    options = parser.parse_args()
    print("| callers | " + " | ".join(MODES) + " |\n|---|" + "---|" * len(MODES))
    for callers in options.callers:
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(ROUNDS):
            for mode in MODES:
                rates[mode].append(measure(mode, callers, options.seconds))
        ratios = [statistics.median(rates[mode]) / statistics.median(rates["never"]) for mode in MODES]
        print(f"| {callers} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return 0


def measure(mode: str, callers: int, seconds: float) -> float:
    """Return the submissions that were answered in a second."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        with ours(store, Path(folder), options=(*ROOMY, "--fsync", mode)) as server:
            client = Client(server.port)
            register_legacy(client, SHAPE, 1)
            (group, *_) = make_groups(SHAPE, 1, environments=1)
            until = time.monotonic() + seconds

            def submit() -> int:
                count = 0
                while time.monotonic() < until:
                    client.request("POST", "/scored_data", group.text, content_type=JSON, idempotency_key=new_key())
                    count += 1
                return count

            with ThreadPoolExecutor(callers) as pool:
                return sum(future.result() for future in [pool.submit(submit) for _ in range(callers)]) / seconds


if __name__ == "__main__":
    sys.exit(main())
