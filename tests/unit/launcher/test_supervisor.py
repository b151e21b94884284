"""The end of children is noticed, they are ended with their descendants, and leave nothing; all are real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from example_trainer.launcher.supervisor import Supervisor
from example_trainer.processes.child import ChildFailed, ChildSpec
from example_trainer.processes.tree import is_alive, python_path, wait_until

SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
STARTS_WORKER = f"""
import subprocess, sys, pathlib, time
worker = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(600)
"""
MAPS_SHARED_MEMORY = """
import mmap, pathlib, sys, tempfile, time
path = pathlib.Path("/dev/shm") / sys.argv[1]
path.write_bytes(b"0" * 4096)
handle = path.open("r+b")
mapping = mmap.mmap(handle.fileno(), 4096)
pathlib.Path(tempfile.gettempdir(), "scratch").touch()
print(tempfile.gettempdir(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path) as supervisor:
        yield supervisor


def python(name: str, code: str, *arguments: str, ends_by_itself: bool = False) -> ChildSpec:
    return ChildSpec(name=name, command=(sys.executable, "-c", code, *arguments), ends_by_itself=ends_by_itself)


def wait_for_file(path: Path) -> str:
    assert wait_until(lambda: path.exists() and path.stat().st_size > 0, 10)
    return path.read_text()


def check_until_failure(supervisor: Supervisor, limit_seconds: float = 10) -> ChildFailed:
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        if failed := supervisor.failed():
            return supervisor.failure(failed)
        time.sleep(0.05)
    raise AssertionError("nothing was noticed")


def test_the_log_of_a_program_that_writes_much_is_kept_small_while_it_runs(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    writes = f"for number in range(3000): print('line', number, flush=True)\nprint('written', flush=True); {SLEEP}"
    child = supervisor.start(replace(python("chatty", writes), largest_log_bytes=10_000))
    assert wait_until(lambda: "written" in child.last_lines(), 20)
    assert wait_until(lambda: supervisor.failed() == [] and child.log_path.stat().st_size < 10_000, 20)
    assert child.last_lines(2) == ["line 2999", "written"]
    assert {path.name for path in tmp_path.glob("chatty*")} == {"chatty.log", "chatty.log.1"}


def test_a_crash_is_reported_with_exit_code_and_last_lines(supervisor: Supervisor) -> None:
    supervisor.start(python("trainer", "print('step 7'); raise SystemExit(4)", ends_by_itself=True))
    failure = check_until_failure(supervisor)
    assert failure.exit_code == 1
    assert "trainer exited with code 4" in str(failure)
    assert "step 7" in str(failure)


@pytest.mark.parametrize(
    ("exit_code", "line"),
    [(2, "prog: error: --lr -1 is below 0"), (3, "prog: stopped by --stop-on: KL 1.50 is above 1")],
)
def test_a_refusal_or_a_stop_at_a_sign_is_one_line_and_keeps_its_exit_code(
    supervisor: Supervisor, exit_code: int, line: str
) -> None:
    code = f"import sys; print('loading'); sys.stderr.write({line!r} + chr(10)); sys.exit({exit_code})"
    supervisor.start(python("trainer", code, ends_by_itself=True))
    failure = check_until_failure(supervisor)
    assert failure.exit_code == exit_code
    assert str(failure) == f"trainer: {line}"


def test_success_of_a_program_that_ends_by_itself_is_not_a_failure(supervisor: Supervisor) -> None:
    child = supervisor.start(python("trainer", "", ends_by_itself=True))
    assert wait_until(lambda: child.exit_code is not None, 10)
    assert supervisor.failed() == []


def test_a_server_that_exits_0_has_failed(supervisor: Supervisor) -> None:
    supervisor.start(python("broker", ""))
    assert "broker exited with code 0" in str(check_until_failure(supervisor))


def test_a_killed_child_is_named_with_its_signal(supervisor: Supervisor) -> None:
    child = supervisor.start(python("vllm", SLEEP))
    os.kill(child.process.pid, 9)
    assert "vllm was killed by SIGKILL" in str(check_until_failure(supervisor))


def test_the_loss_of_a_settled_process_of_a_child_is_a_failure(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("example_trainer.launcher.supervisor.SETTLED_AFTER_SECONDS", 1.0)
    monkeypatch.setattr("example_trainer.processes.child.LOST_PROCESS_GRACE_SECONDS", 0.5)
    supervisor.start(python("vllm", STARTS_WORKER, str(tmp_path / "worker")))
    worker = int(wait_for_file(tmp_path / "worker"))
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert supervisor.failed() == []
        time.sleep(0.05)
    os.kill(worker, 9)
    assert f"vllm lost its process pid {worker}" in str(check_until_failure(supervisor))


def test_a_process_of_a_child_that_is_replaced_is_not_a_loss(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("example_trainer.launcher.supervisor.SETTLED_AFTER_SECONDS", 1.0)
    monkeypatch.setattr("example_trainer.processes.child.LOST_PROCESS_GRACE_SECONDS", 0.5)
    pool = f"""
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
time.sleep(2.2)
worker.kill(); worker.wait()
worker = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
time.sleep(600)
"""
    supervisor.start(python("environment", pool, ends_by_itself=True))
    until = time.monotonic() + 4.5
    while time.monotonic() < until:
        assert supervisor.failed() == []
        time.sleep(0.05)


TRIES_A_LIBRARY = "import time; from ctypes import cdll; cdll.LoadLibrary('libc.so.6'); time.sleep(3.5)"
COMPILES = "import os, time; time.sleep(0.5); os.execvp('sleep', ['sleep', '3'])"


@pytest.mark.parametrize("task", [TRIES_A_LIBRARY, COMPILES])
def test_a_process_by_which_torch_compiles_may_be_slow_and_end(
    task: str, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine such a process of a trainer in 4 bits ran for over three seconds, and its end ended the run."""
    monkeypatch.setattr("example_trainer.launcher.supervisor.SETTLED_AFTER_SECONDS", 2.5)
    monkeypatch.setattr("example_trainer.processes.child.LOST_PROCESS_GRACE_SECONDS", 0.5)
    monkeypatch.setattr("example_trainer.launcher.supervisor.OBSERVE_INTERVAL_SECONDS", 0.2)
    trainer = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {task!r}]); time.sleep(600)"
    supervisor.start(python("trainer", trainer))
    until = time.monotonic() + 6.0
    while time.monotonic() < until:
        assert supervisor.failed() == []
        time.sleep(0.05)


def test_closing_ends_no_process_of_another_that_has_the_number_of_an_ended_child(tmp_path: Path) -> None:
    started = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
    other = subprocess.Popen((sys.executable, "-c", started))
    try:
        assert wait_until(lambda: psutil.Process(other.pid).children() != [], 10)
        (its_own,) = psutil.Process(other.pid).children()
        with Supervisor(tmp_path) as supervisor:
            child = supervisor.start(python("environment", "", ends_by_itself=True))
            assert wait_until(lambda: child.exit_code == 0, 10)
            child.process = SimpleNamespace(pid=other.pid, poll=lambda: 0)
            assert supervisor.failed() == []
        assert is_alive(its_own)
    finally:
        for process in (*psutil.Process(other.pid).children(), other):
            process.kill()
        other.wait()


def test_closing_ends_children_that_ignore_sigterm_and_those_in_sessions_of_their_own(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    child = supervisor.start(python("vllm", STARTS_WORKER, str(tmp_path / "worker")))
    worker = psutil.Process(int(wait_for_file(tmp_path / "worker")))
    stubborn = supervisor.start(python("broker", STUBBORN))
    supervisor.close(grace_seconds=0.5)
    assert not [process for process in (child.handle, worker, stubborn.handle) if is_alive(process)]


CLEANS_UP_AT_A_SECOND_SIGNAL = """
import pathlib, signal, sys, time
signals = []
def note(*_):
    signals.append(1)
    if len(signals) == 2:
        pathlib.Path(sys.argv[1], "cleaned-up").touch()
        sys.exit(0)
signal.signal(signal.SIGTERM, note)
pathlib.Path(sys.argv[1], "serves").touch()
while True:
    time.sleep(600)
"""


def test_a_child_whose_work_outlasts_the_grace_may_clean_up_before_it_is_killed(tmp_path: Path) -> None:
    """An environment drains for 10 s at a first signal; it was killed after 3 s, before its rollouts could clean up."""
    supervisor = Supervisor(tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    child = supervisor.start(python("environment", CLEANS_UP_AT_A_SECOND_SIGNAL, str(tmp_path)))
    assert wait_until((tmp_path / "serves").exists, 10)
    supervisor.close(grace_seconds=0.3)
    assert (tmp_path / "cleaned-up").exists()
    assert child.exit_code == 0


def test_an_urgent_stop_does_not_wait_for_a_child_that_is_still_busy(supervisor: Supervisor) -> None:
    stubborn = supervisor.start(python("trainer", f"print('ready', flush=True); {STUBBORN}"))
    assert wait_until(lambda: "ready" in stubborn.last_lines(), 10)
    asked_at = time.monotonic()
    supervisor.stop("trainer", grace_seconds=60, is_urgent=lambda: time.monotonic() - asked_at > 0.3)
    assert 0.3 < time.monotonic() - asked_at < 10
    assert not is_alive(stubborn.handle)


def test_a_process_that_a_child_has_left_unseen_ends_before_the_child_is_started_again(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    """The supervisor looks for the processes of its children once a second; this child lives for less."""
    other = supervisor.start(python("other", SLEEP))
    pid_path = tmp_path / "pid"
    child = supervisor.start(python("env", STARTS_WORKER.removesuffix("time.sleep(600)\n"), str(pid_path)))
    assert wait_until(lambda: child.exit_code is not None, 20)
    worker = psutil.Process(int(wait_for_file(pid_path)))
    assert is_alive(worker)
    supervisor.stop("env", grace_seconds=0.5)
    assert not is_alive(worker)
    assert other.exit_code is None


def test_an_orphan_is_found_by_the_mark_it_inherited(tmp_path: Path) -> None:
    """Its parent ended before anyone looked, so descent no longer leads to it."""
    supervisor = Supervisor(tmp_path)
    child = supervisor.start(python("vllm", STARTS_WORKER, str(tmp_path / "worker")))
    worker = psutil.Process(int(wait_for_file(tmp_path / "worker")))
    os.kill(child.process.pid, 9)
    supervisor.close(grace_seconds=0.5)
    assert not is_alive(worker)


def test_a_stranger_with_the_same_command_line_survives(tmp_path: Path) -> None:
    decoy = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        supervisor = Supervisor(tmp_path)
        supervisor.start(python("vllm", SLEEP))
        supervisor.close(grace_seconds=1)
        assert decoy.poll() is None
    finally:
        decoy.kill()
        decoy.wait()


def test_shared_memory_and_scratch_files_of_a_killed_child_are_removed(tmp_path: Path) -> None:
    name = f"atropos-test-{os.getpid()}"
    supervisor = Supervisor(tmp_path)
    child = supervisor.start(python("vllm", MAPS_SHARED_MEMORY, name))
    scratch = Path(wait_for_file(child.log_path).strip())
    assert supervisor.failed() == []
    os.kill(child.process.pid, 9)
    supervisor.close(grace_seconds=0.5)
    assert not Path("/dev/shm", name).exists()
    assert not scratch.exists()


def test_what_a_killed_launcher_leaves_is_cleaned_up_for_it(tmp_path: Path) -> None:
    """After `kill -9` of the launcher its descendants end, and nothing is left in memory or on disk."""
    name = f"atropos-test-{os.getpid()}-orphaned"
    launcher = f"""
import sys, time
from pathlib import Path
from example_trainer.launcher.supervisor import ChildSpec, Supervisor
supervisor = Supervisor(Path(sys.argv[1]))
def start(name, *arguments):
    return supervisor.start(ChildSpec(name=name, command=(sys.executable, "-c", *arguments)))
worker = start("a", {STARTS_WORKER!r}, sys.argv[1] + "/worker")
mapper = start("b", {MAPS_SHARED_MEMORY!r}, {name!r})
while not (Path(sys.argv[1]) / "worker").exists() or not mapper.log_path.read_text():
    time.sleep(0.05)
assert supervisor.failed() == []
Path(sys.argv[1], "children").write_text(f"{{worker.process.pid}} {{mapper.process.pid}}")
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher, str(tmp_path)])
    pids = [*map(int, wait_for_file(tmp_path / "children").split()), int((tmp_path / "worker").read_text())]
    tree = [psutil.Process(pid) for pid in pids]
    scratch = Path((tmp_path / "b.log").read_text().strip())
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(is_alive, tree)), 10)
    assert wait_until(lambda: not Path("/dev/shm", name).exists() and not scratch.exists(), 5)


def test_output_of_any_length_never_blocks_a_child(supervisor: Supervisor) -> None:
    child = supervisor.start(python("broker", "print('x' * 2_000_000)", ends_by_itself=True))
    assert wait_until(lambda: child.exit_code is not None, 10)
    assert child.log_path.stat().st_size > 2_000_000


def test_a_refusal_is_reported_though_its_program_s_own_server_still_writes_after_it(supervisor: Supervisor) -> None:
    code = "import sys; print('prog: error: no server'); [print('  log', n) for n in range(30)]; sys.exit(2)"
    supervisor.start(python("trainer", code, ends_by_itself=True))
    assert str(check_until_failure(supervisor)) == "trainer: prog: error: no server"


def test_a_failure_on_a_full_disk_says_so_since_the_log_cannot(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("example_trainer.launcher.supervisor.LEAST_FREE_BYTES", 1 << 60)
    supervisor.start(python("trainer", "raise SystemExit(1)", ends_by_itself=True))
    assert re.search(
        r"trainer exited with code 1 after .* s: the disk of \S+ is full;", str(check_until_failure(supervisor))
    )


def test_a_launcher_killed_while_it_makes_its_temporary_directory_leaves_none(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys
from example_trainer.launcher.supervisor import Supervisor
pathlib.Path.symlink_to = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Supervisor(pathlib.Path(sys.argv[1]))
"""
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": python_path()}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=variables, check=False)
    assert ended.returncode == -9
    assert wait_until(lambda: not list(tmp_path.glob("atropos-*")), 30)


def test_a_user_without_a_name_can_start_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nameless)
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(python("broker", "print('started')", ends_by_itself=True))
        supervisor.wait_for_end(child, lambda: None)
    assert "started" in (tmp_path / "broker.log").read_text()


def test_a_stopped_child_takes_workers_with_it_that_no_look_has_noted(supervisor: Supervisor, tmp_path: Path) -> None:
    """A server may be stopped before the supervisor has looked at its processes once."""
    pid_path = tmp_path / "worker.pid"
    supervisor.start(python("vllm", STARTS_WORKER, str(pid_path)))
    worker = psutil.Process(int(wait_for_file(pid_path)))
    supervisor.stop("vllm")
    assert not is_alive(worker)
