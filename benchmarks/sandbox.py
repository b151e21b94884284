"""Measures a run of code in the sandbox as a multiple of starting Python alone: `python -m benchmarks.sandbox`.

Each kind of isolation that this machine offers is timed in turns with an empty Python, over several rounds; medians
are compared. Eight runs go on at a time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import anyio

from environments.sandbox.python_tool import MECHANISMS, PythonTool, SandboxUnavailable

CODE = "6 * 7"


async def start_python() -> None:
    await anyio.run_process([sys.executable, "-I", "-c", "pass"], stdin=subprocess.DEVNULL)


def tools() -> dict[str, PythonTool]:
    """Return the tool with each kind of isolation that works here."""
    found = {}
    for mechanism in MECHANISMS:
        for use_cgroups in (True, False):
            tool = PythonTool(mechanisms=(mechanism,), use_cgroups=use_cgroups)
            try:
                tool.probe()
            except SandboxUnavailable:
                continue
            found[f"{mechanism}, {'control groups' if use_cgroups else 'counted'}"] = tool
    return found


async def seconds_each(run: Callable[[], Awaitable[object]], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        await run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


async def seconds_together(run: Callable[[], Awaitable[object]], times: int) -> float:
    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(times):
            group.start_soon(run)
    return (time.perf_counter() - started) / times


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=16, help="runs a round")
    options = parser.parse_args()
    ready = tools()
    runs: dict[str, Callable[[], Awaitable[object]]] = {"python": start_python}
    runs |= {name: lambda tool=tool: tool.run(CODE) for name, tool in ready.items()}
    alone: dict[str, list[float]] = {name: [] for name in runs}
    together: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            alone[name].append(await seconds_each(run, options.times))
            together[name].append(await seconds_together(run, options.times))
    for tool in ready.values():
        tool.close()
    base, base_together = statistics.median(alone["python"]), statistics.median(together["python"])
    print(f"{'':32}{'one by one':>14}{'together':>14}")
    for name in runs:
        one, many = statistics.median(alone[name]) / base, statistics.median(together[name]) / base_together
        print(f"{name:32}{one:13.2f}x{many:13.2f}x")


if __name__ == "__main__":
    anyio.run(main)
