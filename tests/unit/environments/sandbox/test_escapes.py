"""Code cannot leave the sandbox, for any user, any isolation mechanism, and several kinds of machines.

ATROPOS_SANDBOX=all tries every user with every kind of machine; the default tries the present ones.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess

import pytest

from environments.sandbox.python_tool import MECHANISMS

from . import attempts
from .conftest import python_of_others, python_path

EVERY = os.environ.get("ATROPOS_SANDBOX", "") == "all"
LONG = pytest.mark.skipif(not EVERY, reason="ATROPOS_SANDBOX=all runs it")
IS_ROOT = os.geteuid() == 0
USERS = ("root", "nobody") if IS_ROOT else ("",)
FORBIDDEN = "namespaces"

pytestmark = pytest.mark.timeout(300)


def require_contained(machine, escapes, drive, **how):
    answer = drive({"escapes": escapes}, output_characters=100_000, **how)
    assert "refused" not in answer, answer
    result = answer["results"]["escapes"]
    assert result["exit_code"] == 0, result
    outcomes = json.loads(result["output"])
    assert len(outcomes) == len(attempts.ATTEMPTS)
    assert {name: got for name, got in outcomes.items() if got} == {}
    assert machine.arrived() == []
    assert machine.victim.poll() is None
    assert answer["left"] == []


def test_no_attempt_to_leave_the_sandbox_succeeds(machine, escapes, drive, mechanism):
    require_contained(machine, escapes, drive, mechanisms=[mechanism])


X86_CALL = """
import ctypes, mmap
rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=rights)
page.write(bytes.fromhex("53b8 14000000 cd80 5b c3"))
run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("getpid gave", run())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have no calls of another width")
def test_a_call_in_the_form_of_32_bits_ends_the_code(drive, mechanism):
    """Such calls have other numbers than those in the filter."""
    result = drive({"call": X86_CALL}, mechanisms=[mechanism])["results"]["call"]
    assert result == {"output": "", "exit_code": 128 + signal.SIGSYS, "ended_by": ""}


@LONG
@pytest.mark.parametrize("use_cgroups", [True, False], ids=["cgroups", "counted"])
@pytest.mark.parametrize("forbid", ["", "user namespaces"])
@pytest.mark.parametrize("user", USERS)
def test_it_is_so_for_every_user_or_the_tool_says_that_it_will_not_run(
    machine, escapes, drive, mechanism, user, forbid, use_cgroups
):
    how = {"user": user, "forbid": forbid, "mechanisms": [mechanism], "use_cgroups": use_cgroups}
    if forbid and user != "root":
        refused = drive({"escapes": escapes}, **how)
        assert "cannot be isolated" in refused["refused"]
        assert machine.arrived() == []
    else:
        require_contained(machine, escapes, drive, **how)


@pytest.mark.parametrize("user", USERS)
def test_where_nothing_can_be_isolated_the_tool_says_in_one_line_that_it_will_not_run(machine, drive, user):
    code = f"open({str(machine.folder / 'secret')!r}).read()"
    refused = drive({"secret": code}, user=user, forbid=FORBIDDEN)["refused"]
    assert refused.count("\n") == 0
    assert all(mechanism in refused for mechanism in MECHANISMS)
    assert "--env.require_isolation false" in refused


def test_outside_of_the_sandbox_the_same_attempts_succeed(machine, escapes):
    """Otherwise the other tests would show nothing. Another user runs it, as some attempts would harm this machine."""
    command = python_of_others() if IS_ROOT else [os.path.realpath("/proc/self/exe")]
    if command is None:
        pytest.skip("no Python here that another user could run")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": python_path(), "TOKEN": "hunter2"}
    done = subprocess.run(
        [*command, "-c", escapes], cwd=machine.folder, capture_output=True, text=True, check=True, env=environment
    )
    outcomes = json.loads(done.stdout.splitlines()[-1])
    got = {name for name, what in outcomes.items() if what}
    assert machine.arrived()
    assert got >= {
        *("a socket in the file system", "a datagram from a pair", "a datagram from a raw pair", "an abstract socket"),
        *("vLLM's ipc socket", "loopback", "the kernel by netlink", "listening", "a named pipe", "devices"),
        *("a secret", "a secret by a link", "a secret upwards", "accounts", "other folders", "shared memory"),
        *("the machine's processes", "its own environment", "control groups", "a file in memory"),
        *("System V memory of others", "System V memory", "System V queues", "keys", "a key of its own"),
    }
