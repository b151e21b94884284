"""The program that runs a model's Python: alone, without a network, with nothing to write to and little to use up.

It reads one JSON object from its standard input, `{"code", "isolate", "cpu_seconds", "memory_bytes", "file_bytes"}`,
and becomes the code's own process. With `isolate` it first moves into Linux namespaces of its own: no network, no view
of other processes, a read-only file system but for an empty folder in memory, and all that was started ends with it.
It imports nothing of this project. `sandbox_child.py --probe` only tells whether that can be done here.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NOBODY = 65534
MOST_OPEN_FILES, MOST_PROCESSES = 64, 32
ISOLATION_FAILED = 97

# What runs as the code's process: like a notebook's cell, the value of a last expression is shown.
RUNNER = """
import ast, sys
source = sys.stdin.read()
tree = ast.parse(source, "<code>")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
scope = {"__name__": "__main__"}
exec(compile(tree, "<code>", "exec"), scope)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
    if value is not None:
        print(repr(value))
"""


class MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd"))


_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    if sys.argv[1:] == ["--probe"]:
        enter_namespaces()
        wait_for(fork_into(lambda: isolate_files(1 << 20)))
    request = json.load(sys.stdin.buffer)
    if not request["isolate"]:
        run_code(request)
    enter_namespaces()

    def first_process() -> None:
        isolate_files(request["file_bytes"])
        wait_for(fork_into(lambda: run_code(request)))

    wait_for(fork_into(first_process))


def enter_namespaces() -> None:
    """New namespaces, in which this user is nobody: what it held over them is gone with the next program."""
    user, group = os.getuid(), os.getgid()
    call("unshare", _libc.unshare, NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123 - starts faster without pathlib
            file.write(text)


def isolate_files(file_bytes: int) -> None:
    """Everything read-only, an empty folder in memory as the working directory, and only our own processes to see."""
    call("make mounts private", _libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    # A container may forbid a /proc of one's own; the old one shows other processes, but lets none be touched.
    _libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    read_only = MountAttributes(set=MOUNT_ATTR_RDONLY)
    size = ctypes.sizeof(read_only)
    call(
        "mount_setattr",
        _libc.syscall,
        SYS_MOUNT_SETATTR,
        AT_FDCWD,
        b"/",
        AT_RECURSIVE,
        ctypes.byref(read_only),
        ctypes.c_size_t(size),
    )
    options = f"size={file_bytes},nr_inodes=1024,mode=777".encode()
    # Over the working directory and not over /tmp, in which this very interpreter may be installed.
    folder = os.getcwd()  # noqa: PTH109 - starts faster without pathlib
    call("mount tmpfs", _libc.mount, b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(folder)


def run_code(request: dict[str, Any]) -> NoReturn:
    """Become the code's process, with the limits set."""
    code = os.memfd_create("code")
    os.write(code, request["code"].encode())
    os.lseek(code, 0, os.SEEK_SET)
    os.dup2(code, 0)
    cpu, memory = request["cpu_seconds"], request["memory_bytes"]
    for limit, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, request["file_bytes"]),
        (resource.RLIMIT_NOFILE, MOST_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if request["isolate"]:
        # Counted apart for each user namespace; outside of one it would count the user's other processes too.
        resource.setrlimit(resource.RLIMIT_NPROC, (MOST_PROCESSES, MOST_PROCESSES))
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, "-I", "-B", "-c", RUNNER])  # noqa: S606 - the purpose of this program


def fork_into(run: Any) -> int:
    """A child that runs `run` and ends with this process."""
    pid = os.fork()
    if pid:
        return pid
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        run()
    except OSError as error:
        fail(error)
    os._exit(0)


def wait_for(pid: int) -> NoReturn:
    """End as that child ends; 128 and the signal's number after a signal, as shells have it."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def call(what: str, function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def fail(error: OSError) -> NoReturn:
    sys.stderr.write(f"{error.strerror}\n")
    sys.stderr.flush()
    os._exit(ISOLATION_FAILED)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(error)
