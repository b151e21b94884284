"""`make gpu` runs each file of checks separately and makes one table, even if files fail.

The machine and the values of the checks are simulated here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import page as pages
from tests.gpu import run
from tests.gpu.page import Finding

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = "from tests.gpu.recording import pytest_runtest_logreport, pytest_terminal_summary, record_claim, report\n"
CHECKS = {
    "test_cuda_ipc.py": """
def test_held(record_claim, report):
    record_claim("graph-reads-published", True)
    report("a rate", "5 GB/s")
def test_fails_before_it_records(record_claim):
    assert 1 == 2, "broken"
    record_claim("one-copy", 0.0)
def test_missed_and_goes_on(record_claim):
    record_claim("publish-bandwidth", 0.1)
    record_claim("masters-survive", True)
""",
    "test_fsdp_step.py": """
import pytest
def test_needs_another_machine(record_claim):
    pytest.skip("one GPU")
    record_claim("fsdp-step", 1.0)
""",
    "test_layouts.py": """
import os
def test_crashes(record_claim):
    record_claim("layout-packed", True)
    os.kill(os.getpid(), 9)
    record_claim("packed-equals-padded", 0.0)
""",
    "test_numerics.py": """
import time
def test_hangs(record_claim):
    record_claim("triton-fp32-default", 1e-3)
    time.sleep(600)
    record_claim("triton-fp32-ieee", 1e-8)
""",
    "test_sharing_time.py": """
def test_held(record_claim):
    record_claim("replay-beside-step", 2.0)
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checks"
    made.mkdir()
    (made / "conftest.py").write_text(CONFTEST)
    for name, text in CHECKS.items():
        (made / name).write_text(text)
    return made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    made = tmp_path / "gpu.md"
    made.write_text(f"# Head\n\n{pages.BEGIN}\n{pages.END}\n")
    return made


def test_a_file_that_fails_crashes_or_hangs_leaves_the_other_claims(
    folder: Path, out: Path, page: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.SECONDS, "test_numerics.py", 8.0)
    monkeypatch.setattr(run, "GRACE_SECONDS", 2.0)
    parts = run.run_files(sorted(folder.glob("test_*.py")), out, [], seconds=250)
    assert run.conclude(parts, "a pretended GPU", out, page) == 1
    found, machine = pages.parse(page.read_text())
    assert machine == "a pretended GPU"
    assert found["graph-reads-published"] == Finding(True)
    assert found["one-copy"].value is None
    assert "broken" in str(found["one-copy"].reason)
    assert found["publish-bandwidth"] == Finding(0.1)
    assert found["masters-survive"] == Finding(True), "recorded after a value that missed its bounds"
    assert found["layout-packed"] == Finding(True), "recorded before the crash"
    assert found["packed-equals-padded"] == Finding(None, "test_layouts.py was ended by SIGKILL")
    assert found["triton-fp32-default"] == Finding(0.001)
    assert found["triton-fp32-ieee"] == Finding(None, "test_numerics.py ran longer than its limit of 8 s")
    assert "one GPU" in str(found["fsdp-step"].reason)
    assert found["replay-beside-step"] == Finding(2.0)
    assert "mfu" not in found, "its file was not run"
    printed = capfd.readouterr().out
    assert "a pretended GPU" in printed
    assert "5 GB/s" in printed
    assert "not tried: " in printed
    assert (out / "gpu.md").read_text() == page.read_text()
    assert "publish-bandwidth" in (out / "table.md").read_text()


def test_a_file_that_a_real_time_signal_ends_leaves_the_other_files(folder: Path, out: Path) -> None:
    """Such a signal has no name, and asking for it ended the run without its table."""
    (folder / "test_numerics.py").write_text("import os\ndef test_ends():\n    os.kill(os.getpid(), 40)\n")
    parts = run.run_files([folder / "test_numerics.py", folder / "test_sharing_time.py"], out, [], seconds=200)
    assert [part.trouble for part in parts] == ["test_numerics.py was ended by signal 40", ""]


def test_the_checks_compile_each_module_once(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are installed as source: each server compiled torch and vLLM again, as none could keep the result."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    written = "import sys\ndef test_may_write():\n    assert not sys.dont_write_bytecode\n"
    (folder / "test_numerics.py").write_text(written)
    (part,) = run.run_files([folder / "test_numerics.py"], out, [], seconds=200)
    assert part.code == 0


def test_flags_select_checks_and_the_rest_is_not_tried(folder: Path, out: Path, page: Path) -> None:
    parts = run.run_files(
        [folder / "test_cuda_ipc.py", folder / "test_sharing_time.py"], out, ["-k", "held"], seconds=200
    )
    assert run.conclude(parts, "a pretended GPU", out, page) == 0
    assert set(run.findings_of(parts)) == {"graph-reads-published", "replay-beside-step"}


def test_a_run_that_measures_nothing_leaves_the_page_whatever_machine_it_is_on(
    folder: Path, out: Path, page: Path
) -> None:
    page.write_text(pages.updated(page.read_text(), {"mfu": Finding(0.4)}, "a pretended card", {}))
    before = page.read_text()
    selected = run.run_files([folder / "test_cuda_ipc.py"], out, ["-k", "no_such_check"], seconds=100)
    unusable = run.run_files([folder / "test_cuda_ipc.py"], out, ["--no-such-flag"], seconds=100)
    for parts, code in (([], 2), (selected, 2), (unusable, 1)):
        assert run.conclude(parts, "another card", out, page) == code
        assert page.read_text() == before
    assert "pytest with code 4" in str(run.findings_of(unusable)["one-copy"].reason)


def test_a_file_that_is_not_there_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["--files", "test_learner.py", "typo.py"])
    assert ended.value.code == 2
    assert "no typo.py in tests/gpu; there are test_cuda_ipc.py, " in capsys.readouterr().err


def test_a_file_whose_checks_cannot_be_read_says_so_for_each_claim(folder: Path, out: Path) -> None:
    (folder / "test_sharing_time.py").write_text("import no_such_module\n")
    parts = run.run_files([folder / "test_sharing_time.py"], out, [], seconds=100)
    assert "test_sharing_time.log has the reason" in str(run.findings_of(parts)["step-beside-replay"].reason)


def test_files_for_which_no_time_is_left_say_so(folder: Path, out: Path) -> None:
    parts = run.run_files([folder / "test_sharing_time.py"], out, [], seconds=1)
    assert "no time was left" in str(run.findings_of(parts)["step-beside-replay"].reason)


def test_without_a_gpu_the_command_names_what_it_skips_and_leaves_the_page() -> None:
    if run.find_machine() is not None:
        pytest.skip("there is a GPU")
    before = pages.PAGE.read_bytes()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/run.py"), "-k", "packed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA GPU" in done.stdout
    assert "packed-to-padded" in done.stdout
    assert pages.PAGE.read_bytes() == before
