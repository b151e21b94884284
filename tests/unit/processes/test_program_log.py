"""A program's log: its last lines, the one that gives the reason of a failure, and the limit on its size."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from example_trainer.processes.program_log import last_lines, limit_size, open_private_log, reason
from example_trainer.processes.tree import wait_until


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["starting", "x.py: error: --lr -1 is below zero", "leaked semaphore objects"], ": x.py: error: --lr -1"),
        (["(EngineCore pid=7) ERROR [core.py:1] ValueError: no memory", "stopping"], "ValueError: no memory"),
        (["Traceback (most recent call last):", "RuntimeError: had enough"], ": RuntimeError: had enough"),
        (["all is well"], ""),
        ([], ""),
    ],
)
def test_the_last_line_that_tells_of_an_error_is_the_reason(lines, told):
    assert told in reason(lines)
    assert bool(reason(lines)) == bool(told)


def test_the_end_of_a_log_is_read_and_a_missing_one_has_no_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(9000)))
    assert last_lines(log) == [f"line {number}" for number in range(8980, 9000)]
    assert last_lines(tmp_path / "none") == []


def test_a_log_that_has_become_too_large_keeps_its_newest_lines_and_its_program_goes_on_writing(tmp_path):
    path, older = tmp_path / "chatty.log", tmp_path / "chatty.log.1"
    echo = "import sys\nfor line in sys.stdin:\n    print(line * 100, end='', flush=True)"
    with (
        open_private_log(path) as log,
        subprocess.Popen([sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=log, text=True) as program,
    ):

        def write(line):
            program.stdin.write(f"{line}\n")
            program.stdin.flush()
            assert wait_until(lambda: last_lines(path)[-1:] == [line] and len(last_lines(path, 200)) % 100 == 0, 20)

        write("first")
        limit_size(path, 10_000)
        assert not older.exists(), "it is smaller than that"
        limit_size(path, 500)
        assert path.read_bytes() == b""
        assert last_lines(path) == ["first"] * 20, "a program that dies now has left these"
        write("second")
        assert path.read_text() == "second\n" * 100, "the program has the file open still, and there is no gap in it"
        assert last_lines(path, 150) == ["first"] * 50 + ["second"] * 100
        limit_size(path, 500)
        write("third")
        assert (older.read_text(), path.read_text()) == ("second\n" * 100, "third\n" * 100)
        assert older.stat().st_mode & 0o777 == 0o600
        program.stdin.close()


def test_no_log_and_no_room_for_its_older_part_are_no_error(tmp_path):
    limit_size(tmp_path / "none.log", 1)
    path = tmp_path / "full.log"
    path.write_text("kept\n")
    (tmp_path / "full.log.1").mkdir()
    limit_size(path, 1)
    assert path.read_text() == "kept\n"


def test_a_log_for_whose_content_the_disk_has_no_room_is_not_copied_in_part(tmp_path, monkeypatch):
    path, older = tmp_path / "large.log", tmp_path / "large.log.1"
    path.write_text("kept\n")
    older.write_text("of before\n")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4))
    limit_size(path, 1)
    assert path.read_text() == "kept\n"
    assert not older.exists()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
    limit_size(path, 1)
    assert (older.read_text(), path.read_text()) == ("kept\n", "")
