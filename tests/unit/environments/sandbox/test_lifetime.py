"""Nothing that code has started outlives its run, however the run, its supervisor or its environment ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time

import anyio
import psutil
import pytest

from environments.sandbox import control_groups, isolation, python_tool
from environments.sandbox.python_tool import (
    MECHANISMS,
    PythonTool,
    SandboxFailed,
    SandboxUnavailable,
    SupervisorExited,
    SupervisorProcess,
)
from environments.sandbox.supervisor import Run

from .conftest import DRIVER, python_path

pytestmark = pytest.mark.anyio

HIDING = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
        os._exit(0)
    os._exit(0)
os.wait()
time.sleep(0.3)
print("left behind", flush=True)
{ending}
"""
"""Code that acts like a daemon: two forks and a session of its own."""

LASTING = HIDING.replace('print("left behind", flush=True)', "").replace("{ending}", "time.sleep(60)")
"""The same code without output, since printing would fail without a reader."""


def marked(mark):
    """Return the processes of this machine that have the mark as an argument."""
    return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


def wait_until(holds, seconds=15):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def mark():
    return f"sleeper-{os.getpid()}-{time.monotonic_ns()}"


async def begun(mark):
    """Wait until the code has started its hidden process."""
    await anyio.to_thread.run_sync(wait_until, lambda: marked(mark))


@pytest.fixture(params=[*MECHANISMS, "limits alone"])
def tool(request):
    if request.param == "bubblewrap" and isolation.find() is None:
        pytest.skip("bubblewrap is not installed here")
    mechanisms = (request.param,) if request.param in MECHANISMS else ()
    made = PythonTool(mechanisms=mechanisms, require_isolation=bool(mechanisms), wall_seconds=10)
    made.probe()
    yield made
    made.close()


@pytest.mark.parametrize("ending", ["", "time.sleep(60)"], ids=["ended", "timed out"])
async def test_processes_that_hide_end_with_the_code(tool, mark, ending):
    tool.wall_seconds = 4.0 if ending else 10.0
    result = await tool.run(HIDING.format(mark=mark, ending=ending))
    assert "left behind" in result.output
    assert result.timed_out == bool(ending)
    # Without a delay: the result is returned when no process is left.
    assert marked(mark) == []


async def test_a_killed_supervisor_takes_its_run_along_and_is_replaced(tool, mark):
    async with anyio.create_task_group() as group:
        group.start_soon(tool.run, LASTING.format(mark=mark))
        await begun(mark)
        (first,) = marked(mark)
        (supervisor,) = tool._supervisors
        os.kill(supervisor.pid, signal.SIGKILL)
        if tool.isolated:
            await anyio.to_thread.run_sync(psutil.wait_procs, [first], 15)
            assert not first.is_running()
        group.cancel_scope.cancel()
    for process in marked(mark):
        process.kill()
    assert (await tool.run("6 * 7")).as_text() == "42"


async def test_a_supervisor_that_comes_late_finds_the_code_waiting(tool):
    """On a busy machine a short program would otherwise end before it is measured."""

    def stop_and_go():
        (supervisor,) = [psutil.Process(supervisor.pid) for supervisor in tool._supervisors]
        wait_until(supervisor.children)
        supervisor.suspend()
        time.sleep(0.4)
        supervisor.resume()

    for _ in range(10):
        assert (await tool.run("1")).as_text() == "1"
    for _ in range(2):
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, stop_and_go)
            assert (await tool.run("6 * 7")).as_text() == "42"


async def test_giving_up_a_run_ends_it(tool, mark):
    async with anyio.create_task_group() as group:
        group.start_soon(tool.run, LASTING.format(mark=mark))
        await begun(mark)
        group.cancel_scope.cancel()
    await anyio.to_thread.run_sync(wait_until, lambda: not marked(mark))


@pytest.mark.parametrize("is_idle", [True, False], ids=["of an idle supervisor", "of a new supervisor"])
async def test_of_a_run_given_up_no_process_and_no_supervisor_is_left(tool, is_idle):
    """Whenever it is given up: before its thread has begun, while the supervisor starts, or while the code runs."""
    for turns in range(8):
        if is_idle:
            await tool.run("1")
        else:
            tool.close()
            tool._closed = False
        given_up = asyncio.ensure_future(tool.run("import time; time.sleep(60)"))
        for _ in range(turns):
            await asyncio.sleep(0)
        used = {supervisor.pid for supervisor in tool._supervisors}
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert tool._supervisors == set(tool._idle)
        kept = {supervisor.pid for supervisor in tool._idle}
        assert not any(psutil.pid_exists(pid) for pid in used - kept - {None})


def test_a_supervisor_that_is_given_up_before_its_start_does_not_start(tool):
    supervisor = SupervisorProcess()
    supervisor.disconnect()
    with pytest.raises(SupervisorExited, match="before its start"):
        supervisor.ask(tool._launch("1", tool.way, ""))
    assert supervisor.pid is None


async def test_a_machine_without_a_process_or_a_file_left_fails_a_run_and_not_the_environment(tool, monkeypatch):
    def out_of_files(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    tool._idle.clear()  # the next run needs a supervisor of its own
    with monkeypatch.context() as patched:
        patched.setattr(python_tool.subprocess, "Popen", out_of_files)
        with pytest.raises(SandboxFailed, match="Too many open files") as caught:
            await tool.run("1")
    assert not caught.value.ends_server
    assert (await tool.run("6 * 7")).as_text() == "42"


def test_a_run_for_which_no_file_is_left_keeps_none_in_its_supervisor(monkeypatch):
    def out_of_files(_):
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr("environments.sandbox.supervisor.sealed_file", out_of_files)
    with socket.socket() as channel:
        before = psutil.Process().num_fds()
        run = Run(PythonTool()._launch("1", python_tool.LIMITS_ALONE, ""), channel, None)
        with pytest.raises(OSError, match="Too many open files in system"):
            run.start(None)
        for descriptor in run._descriptors.values():  # `end` closes these
            os.close(descriptor)
        assert psutil.Process().num_fds() == before


async def test_closing_the_tool_ends_what_runs(tool, mark):
    async def run():
        with pytest.raises(SandboxUnavailable, match="closed"):
            await tool.run(LASTING.format(mark=mark))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await begun(mark)
        tool.close()
        assert marked(mark) == []


def test_a_killed_environment_takes_all_along(mark, mechanism):
    code = LASTING.format(mark=mark)
    request = {"codes": {"hiding": code}, "forbid": "", "settings": {"mechanisms": [mechanism], "wall_seconds": 60}}
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": python_path()}
    with subprocess.Popen([sys.executable, DRIVER], stdin=subprocess.PIPE, env=environment, text=True) as driver:
        driver.stdin.write(json.dumps(request))
        driver.stdin.close()
        wait_until(lambda: marked(mark))
        below = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        _, alive = psutil.wait_procs(below, timeout=15)
    assert alive == []
    assert marked(mark) == []


async def test_supervisors_are_used_again_and_no_more_than_run_at_once(tool):
    tool.at_once = 2
    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(tool.run, "1")
    pids = {supervisor.pid for supervisor in tool._supervisors}
    assert 1 <= len(pids) <= 2
    await tool.run("1")
    assert {supervisor.pid for supervisor in tool._supervisors} == pids
    tool.close()
    assert not any(map(psutil.pid_exists, pids))


async def test_no_control_group_is_left(tool):
    found = control_groups.find()
    if found is None:
        pytest.skip("no control groups can be made here")
    await tool.run("1")
    pids = [supervisor.pid for supervisor in tool._supervisors]
    left = [
        path
        for place in found.places.values()
        for pid in pids
        for path in place.glob(f"{control_groups.PREFIX}{pid}-*")
    ]
    assert left == []
