"""The module isolates code by bubblewrap, the program that Flatpak uses for it, or by Linux namespaces set up here.

`Namespaces` is for machines without bubblewrap. It uses three processes: one that has entered the namespaces, the
first one inside them, which sets up the file system and reaps orphans, and the code's. When the first one inside
exits, the kernel kills all that the code has started.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from environments.sandbox import system_calls
from environments.sandbox.launch import (
    DEVICES,
    FILTER,
    MEMORY_FOLDER,
    NOBODY,
    START_FAILED,
    WORK_FOLDER,
    Launch,
    exec_program,
    user_of_its_own,
)


def find() -> str | None:
    return shutil.which("bwrap", path=os.pathsep.join(("/usr/local/bin", "/usr/bin", "/bin")))


def command(program: str, launch: Launch) -> list[str]:
    """Return the command that runs the code; bubblewrap reads the filter of system calls from descriptor `FILTER`."""
    way, view = launch.way, launch.view
    words = [program, "--die-with-parent", "--new-session", "--hostname", "sandbox", "--seccomp", str(FILTER)]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if way.privileged:
        # The runner needs them to change to another user, which drops them.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    words += ["--perms", "1777", "--size", str(launch.file_bytes), "--tmpfs", MEMORY_FOLDER]
    words += ["--perms", "1777", "--dir", WORK_FOLDER]
    # Parents that bubblewrap makes itself are closed to other users, and root's code runs as another user.
    paths = [path for _, path in (*view.folders, *view.links)] + list(DEVICES)
    parents = {str(parent) for path in paths for parent in Path(path).parents} - {"/"}
    for parent in sorted(parents):
        words += ["--dir", parent]
    for source, path in view.folders:
        words += ["--ro-bind", source, path]
    for target, path in view.links:
        words += ["--symlink", target, path]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    words += ["--symlink", WORK_FOLDER, "/dev/shm"]  # noqa: S108
    words += ["--proc", "/proc", "--remount-ro", "/proc"] if way.proc else []
    words += ["--remount-ro", "/", "--chdir", WORK_FOLDER, "--"]
    return [*words, *launch.runner_command(user_of_its_own() if way.privileged else -1)]


CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18

MNT_DETACH, AT_FDCWD, AT_RECURSIVE, PR_SET_PDEATHSIG = 2, -100, 0x8000, 1

MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

# The same numbers on all machines that the filter knows, except pivot_root.
SYS_MOUNT_SETATTR, SYS_PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}

ROOT_OPTIONS = "size=1m,nr_inodes=8192,mode=755"
MOST_FILES = 1024


class MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd"))


class Namespaces:
    """Isolation by namespaces: the system calls it needs, and the processes and file system made with them."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def exec_isolated(self, launch: Launch, denied: bytes) -> NoReturn:
        """Run the code, isolated and under the filter `denied`, as a grandchild, and exit with its status."""
        self._die_with_parent()
        # Computed before entering the namespaces: the user id depends on the process id, which is always the same
        # inside.
        command = launch.runner_command(user_of_its_own() if launch.way.privileged else -1)
        self._enter(launch)
        self._wait_for(self._fork(lambda: self._first_process(launch, command, denied)))

    def _enter(self, launch: Launch) -> None:
        """Enter the namespaces; in a user namespace this user becomes nobody, with rights over the namespaces only."""
        if launch.way.privileged:
            self._call("unshare", self._libc.unshare, NAMESPACES)
            return
        user, group = os.getuid(), os.getgid()
        self._call("unshare", self._libc.unshare, NAMESPACES | CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {group} 1")

    def _first_process(self, launch: Launch, command: list[str], denied: bytes) -> NoReturn:
        self._die_with_parent()
        self._call("sethostname", self._libc.sethostname, b"sandbox", 7)
        self._build_root(launch)

        def code() -> NoReturn:
            os.setsid()
            system_calls.install(denied)
            exec_program(command, launch.environment())

        self._wait_for(self._fork(code))

    def _build_root(self, launch: Launch) -> None:
        """Make a root folder with the view's folders and links, devices, `/proc`, and the working folder in memory."""
        os.umask(0o022)
        self._mount(None, "/", None, MS_REC | MS_PRIVATE)
        base = "/tmp" if Path("/tmp").is_dir() else "/usr"  # noqa: S108 - any folder; unmounted again soon
        self._mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
        for name in ("old", "new"):
            os.mkdir(f"{base}/{name}")  # noqa: PTH102
        os.chdir(base)
        self._pivot_root(".", "old")
        os.chdir("/")
        self._mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, ROOT_OPTIONS)
        memory = _make_target(MEMORY_FOLDER, is_folder=True)
        options = f"size={launch.file_bytes},nr_inodes={MOST_FILES},mode=1777"
        self._mount("tmpfs", memory, "tmpfs", MS_NOSUID | MS_NODEV, options)
        Path(_make_target(WORK_FOLDER, is_folder=True)).chmod(0o1777)
        for source, path in launch.view.folders:
            self._bind(source, path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
        for device in DEVICES:
            self._bind(device, device, MOUNT_ATTR_NOSUID)
        for target, path in (*launch.view.links, (WORK_FOLDER, "/dev/shm")):  # noqa: S108
            Path(_make_target(path, is_folder=None)).symlink_to(target)
        if launch.way.proc:
            self._mount(
                "proc", _make_target("/proc", is_folder=True), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
            )
        self._change_mount("/new", MOUNT_ATTR_RDONLY, recursive=False)
        os.chdir("/new")
        self._pivot_root(".", ".")
        self._call("umount", self._libc.umount2, b".", MNT_DETACH)
        os.chdir(WORK_FOLDER)

    def _bind(self, source: str, path: str, attributes: int) -> None:
        target = _make_target(path, is_folder=Path(f"/old{source}").is_dir())
        self._mount(f"/old{source}", target, None, MS_BIND | MS_REC)
        self._change_mount(target, attributes, recursive=True)

    def _mount(self, source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
        words = [None if word is None else word.encode() for word in (source, target, kind)]
        self._call(f"mount {target}", self._libc.mount, *words, ctypes.c_ulong(flags), options.encode() or None)

    def _change_mount(self, target: str, attributes: int, *, recursive: bool) -> None:
        wanted = MountAttributes(set=attributes)
        arguments = (AT_FDCWD, target.encode(), AT_RECURSIVE if recursive else 0, ctypes.byref(wanted))
        size = ctypes.c_size_t(ctypes.sizeof(wanted))
        self._call("mount_setattr", self._libc.syscall, SYS_MOUNT_SETATTR, *arguments, size)

    def _pivot_root(self, new: str, old: str) -> None:
        number = SYS_PIVOT_ROOT[os.uname().machine]
        self._call("pivot_root", self._libc.syscall, number, new.encode(), old.encode())

    def _die_with_parent(self) -> None:
        self._call("prctl", self._libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def _call(self, what: str, function: Callable[..., int], *arguments: Any) -> None:
        if function(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    def _fork(self, run: Callable[[], NoReturn]) -> int:
        """Fork a child that calls `run` and never returns into the parent's code; return its process id."""
        pid = os.fork()
        if pid:
            return pid
        try:
            run()
        except OSError as error:
            os.write(2, f"{error.strerror}\n".encode())
        finally:
            os._exit(START_FAILED)

    def _wait_for(self, pid: int) -> NoReturn:
        """Reap children until `pid` exits, then exit with its code, or with 128 plus the signal's number."""
        # The supervisor waits until no process has its pipes open any more.
        os.closerange(0, 64)
        while True:
            ended, status = os.wait()
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)


def _make_target(path: str, *, is_folder: bool | None) -> str:
    """Return the current path of the new root's `path`; make its parents, and itself as a folder or an empty file."""
    target = Path(f"/new{path}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        target.mkdir(exist_ok=True)
    elif is_folder is not None:
        target.touch()
    return str(target)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="ascii")
