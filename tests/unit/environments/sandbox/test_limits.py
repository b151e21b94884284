"""The limits that the kernel enforces, read from inside, and those that the supervisor enforces instead."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from environments.sandbox import control_groups, isolation
from environments.sandbox.isolation import MOST_FILES
from environments.sandbox.launch import MOST_OPEN_FILES, MOST_PROCESSES
from environments.sandbox.python_tool import MECHANISMS, PythonTool

from .bombs import FORKS, MEMORY_OF_MANY

pytestmark = pytest.mark.anyio

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")


IS_ROOT = os.geteuid() == 0
USERS = ("as root", "in a user namespace") if IS_ROOT else ("in a user namespace",)
WAYS = [(mechanism, user) for mechanism in MECHANISMS for user in USERS]


@pytest.fixture(scope="module", params=WAYS, ids=" ".join)
def tried_tool(request):
    mechanism, user = request.param
    if mechanism == "bubblewrap" and isolation.find() is None:
        pytest.skip("bubblewrap is not installed here")
    tool = PythonTool(mechanisms=(mechanism,), memory_bytes=256 << 20, file_bytes=2 << 20, cpu_seconds=7)
    tool.probe()
    tool.way = next(way for way in tool._ways() if user in str(way))
    yield tool
    tool.close()


@pytest.fixture
def sandbox(tried_tool):
    """A tool that isolates its code by the parametrised mechanism, as the parametrised user."""
    yield tried_tool
    tried_tool.use_cgroups = True


@pytest.fixture
def limits_alone():
    """A tool as on a machine where nothing can be isolated."""
    tool = PythonTool(mechanisms=(), require_isolation=False, use_cgroups=False, memory_bytes=256 << 20)
    tool.probe()
    yield tool
    tool.close()


async def told(tool, expression):
    """Evaluate an expression in the sandbox and return its value."""
    result = await tool.run(f"import json, os\nprint(json.dumps({expression}))")
    assert result.exit_code == 0, result
    return json.loads(result.output)


def own_namespace(name):
    return str(Path("/proc/self/ns", name).readlink())


START = """
import os, time
from environments.sandbox.launch import start
os.closerange = lambda first, last: time.sleep(3)  # a billion calls, for a Python without close_range
kept, other = os.pipe()
os.dup2(other, 900)
left = lambda: sum(int(name) > 3 for name in os.listdir("/proc/self/fd")) - 1
began = time.monotonic()
pid = start(lambda: os._exit(left()), {3: kept})
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - began < 2)
"""


def test_a_start_closes_all_descriptors_and_does_not_count_up_to_their_limit():
    """In many containers it is a billion: no code ran within the time of a start."""
    found = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "0 True\n"


async def test_every_process_has_its_limits(sandbox):
    names = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE")
    found = await told(
        sandbox, f"[__import__('resource').getrlimit(number) for number in {[getattr(resource, n) for n in names]}]"
    )
    wanted = (7, 256 << 20, 2 << 20, MOST_OPEN_FILES, MOST_PROCESSES, 0)
    assert dict(zip(names, found, strict=True)) == dict(zip(names, ([value] * 2 for value in wanted), strict=True))


async def test_every_namespace_is_its_own(sandbox):
    expression = f"{{name: os.readlink('/proc/self/ns/' + name) for name in {NAMESPACES}}}"
    inside = await told(sandbox, expression)
    assert {name for name, link in inside.items() if link == own_namespace(name)} == set()


async def test_the_code_runs_as_nobody_without_rights_and_under_the_filter(sandbox):
    status = await told(sandbox, "dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())")
    found = {name: status[name].strip() for name in ("CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp")}
    assert found == {"CapPrm": "0" * 16, "CapEff": "0" * 16, "CapAmb": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    assert "0" not in status["Uid"].split() + status["Gid"].split()
    assert sandbox.way.privileged <= (status["Groups"].strip() == "")


async def test_every_mount_is_read_only_but_the_working_folder_of_limited_size(sandbox):
    lines = await told(sandbox, "open('/proc/self/mountinfo').read().splitlines()")
    mounts = {line.split()[4]: set(line.split()[5].split(",")) for line in lines}
    devices = {path for path in mounts if path.startswith("/dev/")}
    assert {path for path, options in mounts.items() if "ro" not in options} - devices == {"/tmp"}
    assert {path for path, options in mounts.items() if "nosuid" not in options} == set()
    assert {path for path, options in mounts.items() if "nodev" not in options} == devices
    size, files = await told(sandbox, "[(s := os.statvfs('/tmp')).f_blocks * s.f_frsize, s.f_files]")
    assert size == 2 << 20
    # bubblewrap cannot limit the number of files; the supervisor limits it.
    assert files == MOST_FILES or sandbox.way.name == "bubblewrap"


def kernel_counts(tool):
    """Return True if the kernel counts processes; for root, even in a namespace, the supervisor does."""
    return tool.way.privileged or not IS_ROOT


async def test_the_kernel_refuses_a_run_more_processes_than_it_may_have(sandbox):
    sandbox.use_cgroups = False
    result = await sandbox.run(FORKS)
    if not kernel_counts(sandbox):
        assert result.ended_by == "processes"
    else:
        assert result.ended_by == ""
        assert int(result.output.split()[2]) == MOST_PROCESSES - 1


async def test_runs_do_not_take_each_others_processes(sandbox):
    """The kernel counts processes by user."""
    sandbox.use_cgroups = False
    found = []

    async def run():
        found.append(await sandbox.run(FORKS + "time.sleep(0.5)"))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(run)
    if not kernel_counts(sandbox):
        assert {result.ended_by for result in found} == {"processes"}
    else:
        assert {result.output.split()[2] for result in found} == {str(MOST_PROCESSES - 1)}


async def test_without_a_limit_of_the_kernels_the_supervisor_counts_processes(limits_alone):
    # It waits because a busy machine may count its processes for the first time only after the last fork.
    assert (await limits_alone.run(f"{FORKS}time.sleep(30)\n")).ended_by == "processes"


async def test_the_supervisor_counts_memory_of_all_processes_together(limits_alone):
    result = await limits_alone.run(MEMORY_OF_MANY)
    assert result.ended_by == "memory"
    assert "held more than 256 MiB" in result.as_text()


async def test_memory_that_processes_share_is_counted_once(limits_alone):
    """Eight processes that share 60 MiB hold 60, not 480."""
    code = """
import os, time
held = bytearray(60 << 20)
for at in range(0, len(held), 4096):
    held[at] = 1
for _ in range(8):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
for _ in range(8):
    os.wait()
print("fine")
"""
    assert (await limits_alone.run(code)).as_text() == "fine"


async def test_the_supervisor_counts_the_time_of_all_processes_together(limits_alone):
    """No process reaches the kernel's limit, which applies to each."""
    limits_alone.cpu_seconds, limits_alone.wall_seconds = 1, 60.0
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        while time.process_time() < 0.7:
            pass
        os._exit(0)
for _ in range(4):
    os.wait()
print("REACHED")
"""
    result = await limits_alone.run(code)
    assert result.timed_out
    assert "REACHED" not in result.output


@pytest.fixture
def groups():
    found = control_groups.find()
    if found is None:
        pytest.skip("no control groups can be made here")
    return found


def in_group(groups, memory_bytes, processes, run):
    """Return the exit code of a process that does `run` in a group with these limits, and whether memory ended it."""
    group = groups.make()
    try:
        group.limit(memory_bytes, processes)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                group.enter()
                code = run()
            finally:
                os._exit(code)
        return os.waitpid(pid, 0)[1], group.ran_out_of_memory()
    finally:
        group.remove()


def test_a_group_holds_its_processes_together(groups):
    def forks():
        made = []
        try:
            for _ in range(8):
                made.append(os.fork())
                if made[-1] == 0:
                    os._exit(0)
        except BlockingIOError:
            return len(made)
        finally:
            for pid in made:
                os.waitpid(pid, 0)
        return 99

    status, by_memory = in_group(groups, 64 << 20, 4, forks)
    # Four processes: this one and three that it forks; a kernel may count an exited one a moment longer.
    assert os.waitstatus_to_exitcode(status) in (2, 3)
    assert not by_memory


def test_a_group_ends_what_holds_too_much_memory(groups):
    def hold():
        held = bytearray(96 << 20)
        held[::4096] = b"x" * len(held[::4096])
        return 0

    assert in_group(groups, 64 << 20, 4, hold) == (9, True)
    assert in_group(groups, 256 << 20, 4, hold) == (0, False)


def test_no_group_is_left_and_those_of_killed_supervisors_are_swept(groups):
    left = groups.make()
    used = groups.make()
    places = dict.fromkeys(groups.places.values())
    try:
        for folder in left.folders.values():
            os.utime(folder, (0, 0))
        for folder in used.folders.values():
            assert folder.is_dir()
        groups.sweep()
        assert not any(folder.exists() for folder in left.folders.values())
        assert all(folder.exists() for folder in used.folders.values())
    finally:
        used.remove()
    assert not [path for place in places for path in place.glob(f"{control_groups.PREFIX}{os.getpid()}-*")]
