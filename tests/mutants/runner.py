"""Runs tests on one mutant after another: `python runner.py ROOT < jobs.json` gives a JSON line for each.

ROOT holds a copy of the package and its tests. Heavy packages of others are imported once; then each mutant is written
into the copy, tried in a forked child, which imports our package, and undone. So a mutant costs only its test.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120.0
HEALTHY_SECONDS = 1200.0
"""Seconds for the tests of all mutants together, on the unchanged project."""

# Plugins are not searched for, which would cost a second a mutant: the tests use these two.
PLUGINS = ("anyio.pytest_plugin", "pytest_timeout")
OURS = {"atropos_api", "environments", "example_trainer"}
FLAGS = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "--tb=line"]
FLAGS += [word for plugin in PLUGINS for word in ("-p", plugin)]


def warm_up() -> None:
    """Import what tests need besides the packages under test, which only a mutant's child may import."""
    import blake3
    import fastapi
    import httpx
    import isal.isal_zlib
    import msgspec
    import numpy as np
    import pydantic
    import pytest
    import torch
    import transformers.core_model_loading
    import transformers.models.qwen2.modeling_qwen2
    import uvicorn

    # A matrix product and a backward make torch initialise itself now, while there is one process only.
    torch.set_num_threads(1)
    weight = torch.ones(2, 2, requires_grad=True)
    (weight @ weight).sum().backward()
    assert all((blake3, fastapi, httpx, isal, msgspec, np, pydantic, pytest, transformers, uvicorn))
    assert not {name.partition(".")[0] for name in sys.modules} & OURS


def try_in_child(nodes: list[str], log: Path, seconds: float) -> int:
    """Return the exit code of pytest over `nodes` in a child; 124 if it did not end."""
    child = os.fork()
    if child == 0:
        _run_tests(nodes, log)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 124


def _run_tests(nodes: list[str], log: Path) -> None:
    import pytest

    class LeaveAtTheEnd:
        """Ends the child once the summary is printed: two of 116 hung in pytest's later work."""

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
            yield
            sys.stdout.flush()
            os._exit(int(session.exitstatus))

    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        pytest.main([*nodes, *FLAGS], plugins=[LeaveAtTheEnd()])
    finally:
        os._exit(125)


def try_mutant(root: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Try one mutant and return the result: `code` of its test, or -1 if its line is not in the file exactly once."""
    path = root / job["file"]
    original = path.read_text(encoding="utf-8")
    log = root / "log.txt"
    if job["old"] and original.count(job["old"]) != 1:
        return {"name": job["name"], "code": -1, "log": f"{original.count(job['old'])} times in {job['file']}"}
    started = time.monotonic()
    try:
        if job["old"]:
            path.write_text(original.replace(job["old"], job["new"]), encoding="utf-8")
        code = try_in_child(job["nodes"], log, TIMEOUT_SECONDS if job["old"] else HEALTHY_SECONDS)
    finally:
        path.write_text(original, encoding="utf-8")
    seconds = time.monotonic() - started
    return {"name": job["name"], "code": code, "seconds": seconds, "log": log.read_text(encoding="utf-8")[-2000:]}


def main() -> None:
    sys.dont_write_bytecode = True
    root = Path(sys.argv[1])
    os.chdir(root)
    sys.path.insert(0, str(root))
    warm_up()
    for job in json.load(sys.stdin):
        sys.stdout.write(json.dumps(try_mutant(root, job)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
