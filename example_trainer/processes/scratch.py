"""Temporary directories of a program and the processes it starts, removed with all that is in them when it ends.

vLLM's processes meet at sockets and at a file in the temporary directory, and its workers on a CPU share memory that is
named after that file. It removes none of them when a server ends: one worker left four files, two workers left a dozen
and 8 MiB of memory. The launcher gives its children one directory; a server that is started by hand makes its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from example_trainer.processes.cleanup import SHARED_MEMORY

# vLLM appends 37 bytes for a socket, whose whole path the kernel limits to 107.
_LONGEST_BYTES = 70
_SERVER_PREFIX = "atropos-vllm-"
_MEETING_FILES = "vllm_dist_*"
_JUST_MADE_SECONDS = 60.0
"""A directory younger than this may not be locked yet."""


def name_scratch(name: str) -> Path:
    """Return the path of a temporary directory `name`, which is not made yet."""
    scratch = Path(tempfile.gettempdir(), name)
    return scratch if len(os.fsencode(scratch)) <= _LONGEST_BYTES else Path("/tmp", name)  # noqa: S108 - the name is random


def make_scratch(scratch: Path) -> None:
    """Make the temporary directory, with a link to torch's compile cache, so that compiled code is found again."""
    scratch.mkdir(mode=0o700)
    try:
        compile_cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name, which a container may have: then torch compiles again
        return
    compile_cache.mkdir(exist_ok=True)
    (scratch / compile_cache.name).symlink_to(compile_cache)


def scratch_variables(scratch: Path) -> dict[str, str]:
    """Return the environment variables by which a program and vLLM use the directory."""
    return {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}


@contextlib.contextmanager
def server_scratch(environ: MutableMapping[str, str], shared_memory: Path = SHARED_MEMORY) -> Iterator[Path]:
    """Give this process, a vLLM server, a temporary directory of its own while the context lasts.

    The directory is locked, so that the next server removes those of servers that were killed.
    """
    scratch = name_scratch(_SERVER_PREFIX + secrets.token_hex(4))
    _sweep(scratch.parent, shared_memory)
    make_scratch(scratch)
    lock = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = {name: environ.get(name) for name in scratch_variables(scratch)}
    environ.update(scratch_variables(scratch))
    tempfile.tempdir = None  # it is read from the environment once
    try:
        yield scratch
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value
        tempfile.tempdir = None
        _remove(scratch, shared_memory)
        os.close(lock)


def _sweep(parent: Path, shared_memory: Path) -> None:
    """Remove the directories of this user's servers that have ended without removing them."""
    for scratch in parent.glob(f"{_SERVER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, one in use, or one that another server removes now
            lock = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _JUST_MADE_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(scratch, shared_memory)
            finally:
                os.close(lock)


def _remove(scratch: Path, shared_memory: Path) -> None:
    for meeting in scratch.glob(_MEETING_FILES):
        for segment in shared_memory.glob(f"{meeting.name}-*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
