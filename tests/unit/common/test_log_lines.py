"""Input from outside can neither forge log lines nor fill the disk with them."""

import contextlib
import io
import json
import logging
import re

from atropos_api.common import logs


class Written:
    """The lines written to stderr so far, and the context that JSON records tell of."""

    def __init__(self, stderr, context):
        self._stderr = stderr
        self.context = context

    def __call__(self):
        return self._stderr.getvalue().splitlines()


@contextlib.contextmanager
def written(monkeypatch, **options):
    """Log to a stderr that can be read; pytest's own handlers are disabled."""
    root = logging.getLogger()
    with monkeypatch.context() as patch:
        stderr = io.StringIO()
        patch.setattr("sys.stderr", stderr)
        patch.setattr(root, "handlers", [])
        patch.setattr(root, "level", root.level)
        yield Written(stderr, logs.setup_logging("me", **options))


def test_a_record_is_one_line_without_control_characters(monkeypatch):
    with written(monkeypatch) as lines:
        logging.getLogger("a").warning("refused: %s", "x\n00:00:00 me I forged\r\x1b[31m\u2028.")
        (line,) = lines()
    assert line.endswith(r"refused: x\x0a00:00:00 me I forged\x0d\x1b[31m\x2028.")


def test_warnings_of_one_kind_are_counted_instead_of_repeated(monkeypatch):
    with written(monkeypatch) as lines:
        for number in range(logs.MOST_ALIKE + 30):
            logging.getLogger("a").warning("refused: %d", number)
            logging.getLogger("a").info("step %d", number)
        logging.getLogger("a").warning("of another kind")
        assert sum("refused" in line for line in lines()) == logs.MOST_ALIKE
        assert sum("step" in line for line in lines()) == logs.MOST_ALIKE + 30
        assert sum("another kind" in line for line in lines()) == 1
        monkeypatch.setattr(logs, "WINDOW_SECONDS", -1.0)
        logging.getLogger("a").warning("refused: %d", 0)
        assert lines()[-1].endswith("refused: 0 (and 30 more like this before)")


def test_a_machines_clock_that_is_set_back_hides_no_warning(monkeypatch):
    with written(monkeypatch) as lines:
        for _ in range(logs.MOST_ALIKE):
            logging.getLogger("a").warning("refused")
        record = logging.LogRecord("a", logging.WARNING, __file__, 1, "refused", None, None)
        record.created -= 3600
        logging.getLogger("a").handle(record)
        assert len(lines()) == logs.MOST_ALIKE + 1


def test_a_line_begins_with_the_day_and_the_time(monkeypatch):
    with written(monkeypatch) as lines:
        logging.getLogger("a").info("ready")
        (line,) = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d me I ready", line)


def test_a_json_record_tells_program_run_step_and_version(monkeypatch):
    with written(monkeypatch, form="json") as lines:
        known = {"run_id": "r1", "step": 3, "policy_version": None}
        logging.getLogger("a").info("before")
        lines.context.describe(lambda: known)
        logging.getLogger("a").warning("at\n%s", "work")
        lines.context.describe(lambda: 1 / 0)
        logging.getLogger("a").info("at the end")
        before, during, after = map(json.loads, lines())
    assert (before["program"], before["event"], before["level"]) == ("me", "before", "info")
    assert not {"run_id", "step", "policy_version"} & (set(before) | set(after))
    assert (during["run_id"], during["step"], during["event"]) == ("r1", 3, "at\nwork")
    assert "policy_version" not in during
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", during["time"])
