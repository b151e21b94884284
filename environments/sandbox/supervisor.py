"""The supervisor: a process that runs pieces of code one after another in the sandbox, as asked over a socket.

It enforces the limits of each run. It is a subreaper: orphans of a run, even in another process group or session,
become its children, and it kills them before it returns the run's result. `environments.sandbox.python_tool` starts
it with Python's `-I -S` and the socket as standard input, so that it sees neither the packages nor the folder
nor the variables of the environment that it works for.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from environments.sandbox import control_groups, isolation, system_calls
from environments.sandbox.isolation import MOST_FILES, Namespaces
from environments.sandbox.launch import (
    FILTER,
    MOST_PROCESSES,
    READY,
    WORK_FOLDER,
    Launch,
    exec_program,
    sealed_file,
    start,
)

START_SECONDS = 20.0
END_SECONDS = 10.0
OWN_PROCESSES = 3
"""Processes of a run that belong to bubblewrap or to `Namespaces`, and not to the code."""

MEASURE_SECONDS, CHECK_SECONDS = 0.02, 0.1

_PR_SET_CHILD_SUBREAPER = 36
_ENDED_BY_SIGNAL = frozenset({signal.SIGXCPU, signal.SIGKILL})


class ParentDisconnected(Exception):
    """The parent closed the socket, so no process waits for the result any more."""


class Supervisor:
    """Serves requests to run code over a socket: one JSON object a line in each direction."""

    def __init__(self, channel: socket.socket) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        self._channel = channel
        self._groups = control_groups.find()
        self._bubblewrap = isolation.find()
        self._namespaces = Namespaces()

    def serve(self) -> None:
        """Serve requests until the parent closes the socket."""
        with self._channel.makefile("rb") as requests:
            for line in requests:
                try:
                    reply = self.run(Launch.from_json(json.loads(line)))
                except OSError as error:
                    reply = {"failed": error.strerror or str(error)}
                except ParentDisconnected:
                    return
                self._channel.sendall(json.dumps(reply).encode() + b"\n")

    def run(self, launch: Launch) -> dict[str, Any]:
        """Run the code until it ends or reaches a limit; afterwards none of its processes is left."""
        group = self._groups.make() if self._groups and launch.use_cgroups else None
        try:
            if group is not None:
                group.limit(launch.memory_bytes, MOST_PROCESSES + OWN_PROCESSES)
            run = Run(launch, self._channel, group)
            try:
                run.start(self)
                run.watch()
            finally:
                run.end()
            return run.result()
        finally:
            if group is not None:
                group.remove()

    def exec_in_child(self, launch: Launch, group: control_groups.ControlGroup | None, denied: bytes) -> NoReturn:
        """Turn a new process into the first process of a run."""
        if group is not None:
            group.enter()
        if launch.way.name == "bubblewrap":
            if self._bubblewrap is None:
                raise OSError(0, "bubblewrap is not installed")
            exec_program(isolation.command(self._bubblewrap, launch), launch.environment())
        if launch.way.name == "namespaces":
            self._namespaces.exec_isolated(launch, denied)
        os.chdir(launch.folder)
        if denied:
            system_calls.install(denied)
        exec_program(launch.runner_command(), launch.environment())


@dataclass(slots=True)
class Run:
    """A run executes one piece of code, from its first process to its last."""

    launch: Launch
    channel: socket.socket
    group: control_groups.ControlGroup | None
    ended_by: str = ""
    """The limit that ended it: time, memory, processes or files; empty if the code ended by itself."""

    started: bool = False
    _first_pid: int = 0
    _output: bytearray = field(default_factory=bytearray)
    _descriptors: dict[str, int] = field(default_factory=dict)
    _status: int | None = None
    _cpu_seconds: float = 0.0
    _deadline: float = 0.0

    def start(self, supervisor: Supervisor) -> None:
        self._deadline = time.monotonic() + START_SECONDS
        denied = self._filter()
        descriptors, files = self._descriptors, dict[int, int]()
        try:
            descriptors["output"], files[1] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            descriptors["ready"], files[READY] = (end.detach() for end in socket.socketpair())
            os.set_blocking(files[1], True)
            files[2] = files[1]
            files[0] = sealed_file(self.launch.code.encode("utf-8", "replace"))
            if self.launch.way.name == "bubblewrap":
                files[FILTER] = sealed_file(denied)
            self._first_pid = start(lambda: supervisor.exec_in_child(self.launch, self.group, denied), files)
            descriptors["process"] = os.pidfd_open(self._first_pid)
        finally:  # also of a run that could not be started for want of descriptors: this process serves on
            for descriptor in set(files.values()):
                os.close(descriptor)

    def _filter(self) -> bytes:
        """Return the filter of system calls; it allows shared anonymous memory only if a control group counts it."""
        try:
            return system_calls.program(shared_memory=self.group is not None)
        except system_calls.FilterUnknown:
            if self.launch.way.isolates:
                raise
            return b""

    def watch(self) -> None:
        """Wait until the code has ended or reached a limit, which is then stored in `ended_by`."""
        descriptors, waiting = self._descriptors, select.poll()
        for name in ("output", "ready", "process"):
            waiting.register(descriptors[name], select.POLLIN)
        waiting.register(self.channel, select.POLLRDHUP)
        interval = MEASURE_SECONDS if self.group is None else CHECK_SECONDS
        next_check = time.monotonic() + interval
        while not self.ended_by:
            now = time.monotonic()
            events = dict(waiting.poll(max(0.0, min(next_check, self._deadline) - now) * 1000))
            if self.channel.fileno() in events:
                raise ParentDisconnected
            if descriptors["output"] in events and not self._read_output():
                waiting.unregister(descriptors["output"])
            if descriptors["ready"] in events:
                waiting.unregister(descriptors["ready"])
                self._allow_start()
            if descriptors["process"] in events:
                return
            now = time.monotonic()
            if now >= self._deadline:
                self.ended_by = "time"
            elif now >= next_check:
                next_check = now + interval
                self.ended_by = self._limit_reached()

    def end(self) -> None:
        """Kill every process of the run and wait until all have exited."""
        deadline = time.monotonic() + END_SECONDS
        while self._reap():
            for pid in control_groups.descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                # The tool then starts another supervisor; the processes become children of init.
                sys.exit("processes of a run did not exit")
            time.sleep(0.0005)
        # Read the rest of the output. No process has the write end open any more, so this terminates.
        with contextlib.suppress(KeyError, BlockingIOError):
            while self._read_output():
                pass
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def result(self) -> dict[str, Any]:
        """Return the result of the run; call it only after `end`."""
        output = self._output.decode("utf-8", "replace")
        if not self.started:
            return {"failed": output.strip() or f"{self.launch.way} did not start"}
        code = os.waitstatus_to_exitcode(self._status or 0)
        ended_by = self.ended_by
        if not ended_by and self.group is not None and self.group.ran_out_of_memory():
            ended_by = "memory"
        by_signal = -code if code < 0 else code - 128
        if not ended_by and by_signal in _ENDED_BY_SIGNAL and self._cpu_seconds > self.launch.cpu_seconds - 1:
            ended_by = "time"
        return {
            "output": output,
            "exit_code": code,
            "ended_by": ended_by,
            "by_cgroup": self.group is not None,
        }

    def _allow_start(self) -> None:
        """Answer the runner's request to start the code: its time limit begins, and its files are watched."""
        ready = self._descriptors["ready"]
        if os.read(ready, 1) != b"r":
            return
        if self.launch.way.isolates and not self._watch_folder():
            self._output[:] = b"the working folder of the code cannot be watched"
            self._deadline = 0.0
            return
        self._deadline = time.monotonic() + self.launch.wall_seconds
        self.started = True
        os.write(ready, b"g")

    def _watch_folder(self) -> bool:
        """Open the code's working folder through a process inside its file system."""
        own_root = Path("/").stat()
        for pid in control_groups.descendants(self._first_pid):
            with contextlib.suppress(OSError):
                if not os.path.samestat(Path(f"/proc/{pid}/root").stat(), own_root):
                    self._descriptors["folder"] = os.open(f"/proc/{pid}/root{WORK_FOLDER}", os.O_PATH | os.O_CLOEXEC)
                    return True
        return False

    def _read_output(self) -> bool:
        """Read some output and keep it up to `output_bytes`; return False at the end."""
        piece = os.read(self._descriptors["output"], 1 << 16)
        self._output += piece[: max(0, self.launch.output_bytes - len(self._output))]
        return bool(piece)

    def _limit_reached(self) -> str:
        """Return the limit that the run as a whole has reached, or ""."""
        pids = control_groups.descendants(os.getpid())
        usage = control_groups.measure(pids, enough_bytes=self.launch.memory_bytes)
        if usage.cpu_seconds > self.launch.cpu_seconds:
            return "time"
        in_files = 0
        if "folder" in self._descriptors:
            folder = os.fstatvfs(self._descriptors["folder"])
            in_files = (folder.f_blocks - folder.f_bfree) * folder.f_frsize
            if folder.f_files - folder.f_ffree > MOST_FILES:
                return "files"
        if self.group is not None:
            return "memory" if self.group.ran_out_of_memory() else ""
        if usage.memory_bytes + in_files > self.launch.memory_bytes:
            return "memory"
        return "processes" if usage.threads > MOST_PROCESSES + OWN_PROCESSES else ""

    def _reap(self) -> bool:
        """Reap the children that have exited; return False when none is left."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._cpu_seconds += used.ru_utime + used.ru_stime
            if pid == self._first_pid:
                self._status = status


def main() -> None:
    with socket.socket(fileno=0) as channel:
        Supervisor(channel).serve()


if __name__ == "__main__":
    main()
