"""A server whose engine failed gives the reason in its own line, not a reference to another place."""

from __future__ import annotations

import logging
import logging.config
import os
from types import SimpleNamespace

import pytest

from example_trainer.serving.vllm.failure_cause import ask_for_cause, how_ended, note_cause, read_cause


@pytest.fixture
def engine_log():
    """The logger to which vLLM's engine reports its end."""
    logger = logging.getLogger("vllm.v1.engine.core")
    before = logger.filters[:]
    yield logger
    logger.filters[:] = before


def test_the_exception_an_engine_logs_as_its_end_is_reported_though_it_sets_its_logging_up_anew(
    engine_log, monkeypatch, tmp_path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("ATROPOS_ENGINE_CAUSE", "")
    path = ask_for_cause(os.environ, "00")
    note_cause()
    logging.config.dictConfig(
        {"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {"handlers": [], "propagate": False}}}
    )
    engine_log.error("something went wrong before")
    assert read_cause(path) is None
    engine_log.error("EngineCore failed to start.", exc_info=ValueError("No available memory\nfor the cache blocks"))
    assert read_cause(path) == "ValueError: No available memory for the cache blocks"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("codes", "told"), [([None, -9], "SIGKILL"), ([-35], "signal 35"), ([1], "exit code 1"), ([], "does not answer")]
)
def test_an_engine_that_ended_silently_is_described_by_its_exit_code(codes, told):
    assert told in how_ended([SimpleNamespace(exitcode=code) for code in codes])
