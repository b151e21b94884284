"""`make gpu` runs each file of checks separately and makes one table, even if files fail.

The machine and the values of the checks are simulated here.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
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


def test_files_with_the_shortest_limit_are_first_and_those_that_need_vllm_last(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is ended early has then shown most."""
    monkeypatch.setattr(run, "run_file", lambda *_: None)
    files = sorted(run.FOLDER.glob("test_*.py"))
    names = [part.path.name for part in run.run_files(files, out, [], seconds=1e6)]
    limits = [run.limit_of(Path(name)) for name in names if "vllm" not in name]
    assert limits == sorted(limits)
    assert ["vllm" in name for name in names] == sorted("vllm" in name for name in names)
    assert names.index("test_cuda_ipc.py") < names.index("test_learner.py") < names.index("test_kernels.py")


def test_files_for_which_the_time_was_too_short_leave_the_values_of_an_earlier_run(
    folder: Path, out: Path, page: Path
) -> None:
    """A second run on the same machine took the first one's values away when its time ended."""
    machine = "one GPU, driver 580.159.04"
    page.write_text(pages.updated(page.read_text(), {"step-beside-replay": Finding(2.0)}, machine, {}))
    parts = run.run_files([folder / "test_sharing_time.py"], out, [], seconds=1)
    parts += run.run_files([folder / "test_cuda_ipc.py"], out, ["-k", "held"], seconds=200)
    run.conclude(parts, machine, out, page)
    found, _ = pages.parse(page.read_text())
    assert found["step-beside-replay"] == Finding(2.0)
    assert "no time was left" in str(found["replay-beside-step"].reason)
    assert found["graph-reads-published"] == Finding(True)


def test_packages_on_the_path_are_found_by_the_checks(
    folder: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages are unpacked into a folder on PYTHONPATH, which was overwritten, if nothing can be installed."""
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "unpacked" / "an_unpacked_package.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "unpacked"))
    (folder / "test_numerics.py").write_text("def test_imports():\n    import an_unpacked_package, tests.gpu.page\n")
    (part,) = run.run_files([folder / "test_numerics.py"], out, [], seconds=200)
    assert part.code == 0


def test_no_process_of_a_file_outlives_it(folder: Path, out: Path, tmp_path: Path) -> None:
    """A server left by a file that has crashed would compute beside the checks of the next."""
    text = (
        "import os, subprocess\nfrom pathlib import Path\ndef test_crashes():\n"
        f"    left = subprocess.Popen(['sleep', '300'])\n"
        f"    Path({str(tmp_path / 'left')!r}).write_text(str(left.pid))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    (folder / "test_numerics.py").write_text(text)
    run.run_files([folder / "test_numerics.py"], out, [], seconds=200)
    wait_for_end_of(int((tmp_path / "left").read_text()))


def wait_for_end_of(pid: int) -> None:
    limit = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < limit, f"{pid} still runs"
            time.sleep(0.02)


STARTED = """
import sys
from pathlib import Path
from tests.gpu import run
run.FOLDER, run.pages.PAGE = Path(sys.argv[1]), Path(sys.argv[2])
run.find_machine = lambda: "a pretended GPU"
run.GRACE_SECONDS = 2.0
sys.exit(run.main(["--files", "test_cuda_ipc.py", "test_numerics.py"]))
"""
HANGS = """
import os, time
from pathlib import Path
def test_hangs(record_claim, report):
    record_claim("triton-fp32-default", 1e-3)
    report("process", str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_a_table_of_what_it_found_and_no_process(
    number: signal.Signals, folder: Path, out: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout` and the end of a lease do: the table was only written at the end, and the check kept the GPU."""
    monkeypatch.setenv("GPU_OUT", str(out))
    shutil.copy(run.FOLDER / "pytest.ini", folder)
    (folder / "test_numerics.py").write_text(HANGS)
    started = subprocess.Popen([sys.executable, "-c", STARTED, str(folder), str(page)], cwd=ROOT)
    try:
        rows = wait_for_rows(out / "test_numerics.jsonl", 2)
        started.send_signal(number)
        assert started.wait(60) != 0
    finally:
        started.kill()
    wait_for_end_of(int(rows[1]["figure"][1]))  # type: ignore[index]
    found, machine = pages.parse(page.read_text())
    assert machine == "a pretended GPU"
    assert found["graph-reads-published"] == Finding(True)
    assert ("triton-fp32-default" in found) == (number == signal.SIGTERM)
    assert "graph-reads-published" in (out / "table.md").read_text()


def wait_for_rows(path: Path, count: int) -> Sequence[dict[str, object]]:
    limit = time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < limit, f"{path} has no {count} rows"
        time.sleep(0.05)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_that_was_written_in_part_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"claim": "mfu", "value": 0.4}\n{"claim": "one-c')
    assert run.records_in(tmp_path / "rows") == [{"claim": "mfu", "value": 0.4}]
    assert run.records_in(tmp_path / "none") == []


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
