"""Malformed bodies affect only the client that sends them; `ATROPOS_MUTANTS=10000` makes the short run long."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "mutated_bodies"
MUTANTS = int(os.environ.get("ATROPOS_MUTANTS", "150"))


def test_mutants_cost_their_neighbours_nothing():
    options = ["--count", str(MUTANTS), "--rounds", "1", "--rate", "100", "--seed", str(os.getpid()), "--json"]
    command = [sys.executable, str(SCRIPT), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, f"seed {os.getpid()}: {result.stderr}"
    figures = json.loads(result.stdout)
    assert figures["mutants"] == MUTANTS
    assert figures["server errors"] == 0
    assert figures["silences"] == 0
    assert figures["neighbours' groups"] > 20
    assert (figures["lost"], figures["altered"], figures["failures"]) == ([], [], [])
    assert figures["broker still alive"]
    before, *_, after = figures["resident MiB before, after each round, at the end"]
    # What the allocator keeps of freed memory is bounded.
    assert after < before + 96
