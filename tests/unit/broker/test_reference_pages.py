"""The broker's reference page and help texts agree with the code."""

import re
import subprocess
import sys
from pathlib import Path

from atropos_api.common.option_flags import list_options
from atropos_api.config import BrokerConfig
from atropos_api.generate_docs import render
from atropos_api.routes.schema import operations_of
from atropos_api.testing import make_memory_app

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "broker.md"
UNITS = r"[Ss]econds|[Bb]ytes|[Ss]equences|[Bb]atches|[Cc]onnections|[Bb]odies|body|steps|Port"


def test_the_reference_is_what_the_code_says():
    written = render(operations_of(make_memory_app().routes))
    assert REFERENCE.read_text(encoding="utf-8") == written, "write it anew: python -m atropos_api.generate_docs"


def test_every_flag_has_a_meaning_a_default_and_a_unit():
    for option in list_options(BrokerConfig):
        assert re.search("[Dd]efault: |none by default", option.help), option.path
        kind = BrokerConfig.model_fields[option.path].annotation
        if kind in {int, float, int | None, float | None}:
            assert re.search(UNITS, option.help), option.path


def test_help_says_how_many_runs_a_broker_has():
    command = [sys.executable, "-m", "atropos_api", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "One run is open at a time; a second concurrent run needs a second broker" in " ".join(text.split())
    for option in list_options(BrokerConfig):
        assert option.flags[0] in text


def test_a_log_level_that_does_not_exist_is_refused_in_one_line():
    command = [sys.executable, "-m", "atropos_api", "--log-level", "loud"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "--log-level" in result.stderr
