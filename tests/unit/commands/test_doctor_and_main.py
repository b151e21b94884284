"""`atropos` lists its verbs and names mistakes; the doctor finds a package that would be imported in place of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from example_trainer.commands import main
from example_trainer.commands.doctor import machine
from example_trainer.launcher import run_dir


def make_foreign_package(site: Path, *, files: str) -> None:
    info = site / "atroposlib-0.4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atroposlib\nVersion: 0.4.0\n")
    (info / "RECORD").write_text(files)


def test_an_unknown_verb_is_reported_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown verb 'docter', did you mean doctor\?"):
        main.run(["docter"])
    assert main.run(["--help"]) == 0
    assert "report" in capsys.readouterr().out


def test_a_verb_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="takes directories of runs; got none"):
        main.run(["report"])
    main.run(["report", "--help"])
    assert "usage: atropos report RUN" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no broker answers"):
        main.run(["top", "http://127.0.0.1:9"])


@pytest.mark.parametrize(
    "flags", [["--model-name", "tiny/chain", "--env", "my_env.py"], ["--env.task=chain"], ["--env", "my_env.py"]]
)
def test_a_flag_of_a_run_is_told_to_follow_a_run_file(flags: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        main.run(["doctor", *flags])
    flag = flags[0].partition("=")[0]
    told = f"{flag} is a flag of a run, and these follow a run file: atropos doctor demo {' '.join(flags)}"
    assert str(refused.value) == told
    with pytest.raises(ConfigError, match="unknown option --memry, did you mean --memory"):
        main.run(["doctor", "--memry", "org/model"])


def test_a_report_shows_the_rollouts_of_a_run_and_says_of_which_there_can_be_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timestamp": 1.0, "reward/mean": 0.5}\n')
    groups = {name: tmp_path / f"rollouts/{name}.jsonl" for name in ("environment", "environment-2")}
    chat = '[[{"role": "assistant", "content": "Three."}]]'
    groups["environment"].write_text(f'{{"scores": [1], "messages": {chat}}}\n')
    groups["environment-2"].write_text("no group\n")
    assert main.run(["report", str(tmp_path), "--cost-per-hour", "2.5"]) == 0
    page = groups["environment"].with_suffix(".html")
    assert "Three." in page.read_text()
    printed = capsys.readouterr().out
    assert "cost" in printed
    told = [line for line in printed.splitlines() if line.startswith("rollouts: ")]
    assert f"rollouts: {page}" in told
    assert any(f"no page of {groups['environment-2']} ({groups['environment-2']}:1: not JSON" in line for line in told)


@pytest.mark.parametrize("price", [("--cost-per-hour", "3600"), ("--cost-per-hour=3600",)])
def test_a_price_is_taken_in_both_forms_of_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], price: tuple[str, ...]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timestamp": 1.0, "reward/mean": 0.5}\n')
    assert main.run(["report", *price, str(tmp_path)]) == 0
    assert "cost" in capsys.readouterr().out


def test_a_price_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    for price in ("cheap", "-2.5", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"--cost-per-hour {price} is not a price; give a number"):
            main.run(["report", str(tmp_path), "--cost-per-hour", price])
    with pytest.raises(ConfigError, match="--cost-per-hour  is not a price"):
        main.run(["report", str(tmp_path), "--cost-per-hour"])
    with pytest.raises(ConfigError, match="--cost-per-hour cheap is not a price"):
        main.run(["report", "--cost-per-hour=cheap", str(tmp_path)])


def test_the_doctor_reports_versions_memory_and_ports() -> None:
    findings = list(machine.examine())
    assert {finding.subject for finding in findings} >= {"versions", "packages", "machine", "shared memory", "ports"}


def test_an_installed_atroposlib_is_not_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_foreign_package(tmp_path, files="atroposlib/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run_dir.shadowing() is None


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
