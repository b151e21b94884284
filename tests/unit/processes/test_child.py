"""The message about a failed program has the line that gives the reason, before the end of its log."""

from __future__ import annotations

import pytest

from example_trainer.processes.child import last_lines, reason


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
