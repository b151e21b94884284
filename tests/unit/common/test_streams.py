"""A program works with the standard streams that it is given: none, an encoding of few letters, a lost reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from atropos_api.common.cliconfig import run_cli

def main(argv):
    opened = open(__file__, "rb")
    assert opened.fileno() > 2, opened.fileno()
    print("größer " * int(argv[0]))
    sys.stdin.read()
    return 0

run_cli(main)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def start(program: str, redirection: str, *, repeats: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    command = f'"$0" "$1" {repeats} {redirection}'
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    return subprocess.run(
        ["sh", "-c", command, sys.executable, program], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.parametrize("redirection", ["<&-", ">&- </dev/null", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_as_good_as_none(program: str, redirection: str) -> None:
    ended = start(program, redirection)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_letter_that_the_encoding_lacks_is_written_as_an_escape(program: str) -> None:
    ended = start(program, "</dev/null", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (ended.returncode, ended.stdout) == (0, "gr\\xf6\\xdfer \n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("repeats", [1, 100_000])
def test_a_full_disk_is_one_line(program: str, repeats: int, unbuffered: str) -> None:
    ended = start(program, "</dev/null >/dev/full", repeats=repeats, PYTHONUNBUFFERED=unbuffered)
    told = "program.py: error: the output cannot be written (No space left on device)\n"
    assert (ended.returncode, ended.stderr) == (2, told)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("repeats", [1, 100_000])
def test_a_reader_that_has_left_ends_a_command_silently(program: str, repeats: int, unbuffered: str) -> None:
    command = [sys.executable, program, str(repeats)]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
