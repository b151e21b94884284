"""Hosts of a test: network namespaces with an address each, joined by a bridge, without each other's shared memory.

A host's name, loopback, /dev/shm and temporary directory are its own; the rest of the file system is this machine's,
except for the folders that a program is started without. Making them takes root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.213.77"
"""The first three bytes of the hosts' addresses; they are seen by the namespaces alone."""


def why_not() -> str | None:
    """Return why no hosts can be made here, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    tried = subprocess.run(["ip", "netns", "add", "atropos-try"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespaces can be made here: {tried.stderr.strip()}"
    _ip("netns", "delete", "atropos-try")
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Host:
    """One host: `start` runs a program there, `disconnect` takes its cable out."""

    network: str
    number: int
    folder: Path
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"{self.network}-{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def start(
        self, name: str, *command: str, without: Sequence[Path] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a program of the project; it finds empty folders in the place of those in `without`."""
        scratch = self.folder / f"host-{self.number}"
        scratch.mkdir(exist_ok=True)
        mounts = [f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in (Path("/dev/shm"), *without)]
        own = [f"hostname host-{self.number}", *mounts, f"exec {shlex.join([sys.executable, *command])}"]
        own_folders = dict.fromkeys(("TMPDIR", "HOME", "LOGDIR"), str(scratch))
        environ = os.environ | own_folders | variables
        with self.log(name).open("ab") as log:
            program = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", " && ".join(own)],
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.programs.append(program)
        return program

    def output(self, code: str) -> str:
        """Return what a line of Python prints on this host."""
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def disconnect(self) -> None:
        _ip("-n", f"{self.network}-0", "link", "set", f"port{self.number}", "down")

    def connect(self) -> None:
        _ip("-n", f"{self.network}-0", "link", "set", f"port{self.number}", "up")


class Hosts:
    """A network of hosts, whose namespace 0 has the bridge; leaving it ends all programs and removes the network."""

    def __init__(self, folder: Path, count: int) -> None:
        self.network = f"atropos{os.getpid()}"
        self.hosts = [Host(self.network, number, folder) for number in range(1, count + 1)]

    def __enter__(self) -> list[Host]:
        bridge = f"{self.network}-0"
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            far = ["eth0", "netns", host.namespace]
            _ip("-n", bridge, "link", "add", f"port{host.number}", "type", "veth", "peer", "name", *far)
            _ip("-n", bridge, "link", "set", f"port{host.number}", "master", "bridge", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", link, "up")
        return self.hosts

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            for program in host.programs:
                if program.poll() is None:
                    os.killpg(program.pid, signal.SIGKILL)
                program.wait()
        for number in range(len(self.hosts) + 1):
            subprocess.run(["ip", "netns", "delete", f"{self.network}-{number}"], check=False, capture_output=True)
