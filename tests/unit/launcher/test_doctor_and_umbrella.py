"""`atropos` names its verbs and mistakes in them; the doctor sees a package that would be imported in place of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer.running import doctor, umbrella


def make_foreign_package(site: Path, *, files: str) -> None:
    info = site / "atroposlib-0.4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atroposlib\nVersion: 0.4.0\n")
    (info / "RECORD").write_text(files)


def test_an_unknown_verb_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown verb 'docter', did you mean doctor\?"):
        umbrella.run(["docter"])
    assert umbrella.run(["--help"]) == 0
    assert "report" in capsys.readouterr().out


def test_a_verb_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="takes one argument, RUN; got 0"):
        umbrella.run(["report"])
    umbrella.run(["report", "--help"])
    assert "usage: atropos report RUN" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no broker answers"):
        umbrella.run(["top", "http://127.0.0.1:9"])


def test_the_doctor_reports_versions_memory_and_ports() -> None:
    findings = list(doctor.examine())
    assert {finding.subject for finding in findings} >= {"versions", "packages", "machine", "shared memory", "ports"}


def test_atroposlib_beside_us_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_foreign_package(tmp_path, files="atroposlib/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.shadowing() is None


def test_atroposlib_over_us_ends_a_launch_with_the_remedy(tmp_path: Path) -> None:
    make_foreign_package(tmp_path, files="atroposlib/__init__.py,,\nexample_trainer/run.py,,\n")
    code = "import sys; sys.path.append(sys.argv.pop(1)); from example_trainer.run import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "--model-name", "m"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "atroposlib 0.4.0 is installed and brings its own example_trainer" in ended.stderr
    assert "pip uninstall atroposlib" in ended.stderr
