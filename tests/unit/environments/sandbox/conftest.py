"""A machine around the sandbox, with everything that its code must not reach, and users and machines to try."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from environments.sandbox import isolation
from environments.sandbox.launch import DEVICES, view_of_this_python
from environments.sandbox.python_tool import MECHANISMS

from . import attempts

ROOT = Path(__file__).parents[4]
DRIVER = Path(__file__).with_name("driver.py")
NOBODY = 65534
SECRET = "hunter2"


class Machine:
    """Sockets, pipes, files and processes outside of the sandbox."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"victim-{os.getpid()}"
        victim = (sys.executable, "-c", "import time; time.sleep(600)", self.mark)
        self.victim = subprocess.Popen(victim, env={"TOKEN": SECRET})
        (folder / "secret").write_text(SECRET)
        self.secret_file = os.open(folder / "secret", os.O_RDONLY)
        os.mkfifo(folder / "pipe")
        self._pipe = os.open(folder / "pipe", os.O_RDWR | os.O_NONBLOCK)
        self._shared = Path(f"/dev/shm/atropos-test-{os.getpid()}")
        self._shared.write_text(SECRET)
        self._libc = ctypes.CDLL(None)
        self._segment = self._libc.shmget(0, 4096, 0o1666)
        self._paths = {
            "socket": str(folder / "socket"),
            "datagram": str(folder / "datagram"),
            "abstract": f"\0atropos-test-{os.getpid()}",
        }
        self._listeners = []
        for name, path in self._paths.items():
            kind = socket.SOCK_DGRAM if name == "datagram" else socket.SOCK_STREAM
            self._listeners.append(socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK))
            self._listeners[-1].bind(path)
        self._listeners.append(socket.create_server(("127.0.0.1", 0)))
        for listener in self._listeners:
            listener.setblocking(False)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()
        self._zeromq = zmq.Context.instance().socket(zmq.PULL)
        self._zeromq.bind(f"ipc://{folder / 'ipc-of-vllm'}")
        for path in folder.iterdir():
            path.chmod(0o666)

    def as_seen(self) -> dict[str, object]:
        """Return the places of all these things, for code that tries to reach them."""
        top = view_of_this_python().top
        hidden = [path for path in Path("/").iterdir() if path.name not in top]
        hidden += [self.folder, ROOT / "environments", ROOT / "pyproject.toml", DRIVER]
        devices = [str(path) for path in Path("/dev").rglob("*") if _is_device(path)]
        return self._paths | {
            "zeromq": str(self.folder / "ipc-of-vllm"),
            "port": self._listeners[-1].getsockname()[1],
            "pipe": str(self.folder / "pipe"),
            "secret": str(self.folder / "secret"),
            "devices": [path for path in devices if path not in DEVICES],
            "folders": [str(path) for path in hidden],
            "shared": self._shared.name,
            "segment": self._segment,
            "victim": self.victim.pid,
            "mark": self.mark,
        }

    def arrived(self) -> list[object]:
        """Return everything that arrived from inside the sandbox, by any way."""
        found: list[object] = []
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    found.append(listener.recv(100))
                else:
                    listener.accept()[0].close()
                    found.append("a connection")
        with contextlib.suppress(BlockingIOError):
            found.append(os.read(self._pipe, 100))
        return [*found, self._zeromq.recv()] if self._zeromq.poll(0) else found

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self._libc.shmctl(self._segment, 0, None)
        self._shared.unlink()
        self._zeromq.close()
        for listener in self._listeners:
            listener.close()
        for descriptor in (self.secret_file, self._pipe):
            os.close(descriptor)


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


@pytest.fixture
def machine():
    folder = Path(tempfile.mkdtemp(prefix="atropos-test-", dir="/tmp"))
    folder.chmod(0o777)
    made = Machine(folder)
    yield made
    made.close()
    shutil.rmtree(folder)


@functools.cache
def python_of_others() -> list[str] | None:
    """Return a command that starts Python with our packages as another user; None without such a user."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return None
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c", 'exec "$@"', "sh"]
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        tried = subprocess.run(
            [*become, python, "-c", "import environments.sandbox.python_tool, psutil"],
            env={"PYTHONPATH": python_path()},
            check=False,
            capture_output=True,
        )
        if tried.returncode == 0:
            return [*become, python]
    return None


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])


@pytest.fixture
def drive(machine):
    """Run codes in the tool in a process of its own, as a user and on a machine of some kind."""

    def driven(codes: dict[str, str], *, user: str = "", forbid: str = "", **settings: object) -> dict[str, object]:
        command = [sys.executable]
        if user == "nobody":
            command = python_of_others() or pytest.skip("no Python here that another user could run")
        request = {"codes": codes, "forbid": forbid, "settings": settings}
        done = subprocess.run(
            [*command, str(DRIVER)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": python_path(), "SECRET_TOKEN": SECRET},
            pass_fds=(machine.secret_file,),
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    return driven


@pytest.fixture
def escapes(machine):
    """The program that tries to leave the sandbox."""
    from environments.sandbox.system_calls import DENIED

    return attempts.program(machine.as_seen(), DENIED)


@pytest.fixture(params=MECHANISMS)
def mechanism(request):
    if request.param == "bubblewrap" and isolation.find() is None:
        pytest.skip("bubblewrap is not installed here")
    return request.param
