"""Keeping code in by bubblewrap, the program that Flatpak does it by."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from environments.tasks.sandbox.launch import FILTER, NOBODY, Launch, user_of_its_own
from environments.tasks.sandbox.view import DEVICES, WORK_FOLDER


def find() -> str | None:
    return shutil.which("bwrap", path=os.pathsep.join(("/usr/local/bin", "/usr/bin", "/bin")))


def command(program: str, launch: Launch) -> list[str]:
    """The command that runs the code; it reads its filter of system calls from the descriptor `FILTER`."""
    way, view = launch.way, launch.view
    words = [program, "--die-with-parent", "--new-session", "--hostname", "sandbox", "--seccomp", str(FILTER)]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if way.privileged:
        # For the change to another user, which takes them away.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    words += ["--perms", "1777", "--size", str(launch.file_bytes), "--tmpfs", WORK_FOLDER]
    # Those that bubblewrap makes by itself are closed to others, and root's code becomes another.
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
