"""`make gpu`: runs each file of checks in a process of its own, then prints one table of claims and writes the page.

A file that crashes, hangs or fails leaves the others running, and what it recorded before is kept. Files with the
shortest limit are first, and table and page are written after each, so that a run that is ended early has shown most.
Logs, records and the table go to `$GPU_OUT`, else to `build/gpu`; nothing else is written but
`docs/explanation/gpu.md`, and that only if a value was measured. Arguments that are not listed by `--help` go to
pytest: `make gpu GPU_FLAGS="-k packed"`. Nothing that has to be installed is imported here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from example_trainer.processes import die_with_parent
from example_trainer.processes.program_log import signal_name
from tests.gpu import page as pages
from tests.gpu.claims import CLAIMS, Claim
from tests.gpu.page import ROOT, Finding
from tests.gpu.variables import with_repository

FOLDER = ROOT / "tests" / "gpu"
ALL_SECONDS = 3600.0
SECONDS = {
    "test_kernels.py": 360.0,
    "test_learner.py": 240.0,
    "test_one_card.py": 300.0,
    "test_sharing_time.py": 310.0,
    "test_vllm_modes.py": 1500.0,
    "test_vllm_demo.py": 600.0,
}
"""Limits of single files. The four modes start vLLM six times, and a start is expected to take 40 to 90 s."""
OTHER_SECONDS = 120.0
GRACE_SECONDS = 10.0
LOG_LINES = 30
TABLE = "table.md"
TESTS_FAILED, NOTHING_COLLECTED = 1, 5
"""Exit codes of pytest."""
MACHINE = """
import importlib.metadata, peft, pytest, torch, transformers
def version(name):
    try:
        return name + " " + importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "no " + name
if torch.cuda.is_available():
    names = ", ".join(version(name) for name in ("torch", "triton", "transformers", "vllm"))
    print("one " + torch.cuda.get_device_name() + ", CUDA " + str(torch.version.cuda) + ", " + names)
"""


@dataclass
class FileRun:
    """One file of checks, and how its process ended."""

    path: Path
    code: int = 0
    seconds: float = 0.0
    trouble: str = ""
    """The reason for which none of its further claims could be shown; empty if the process ended by itself."""
    out_of_time: bool = False
    """True if the time for all files ended it or left it none."""
    records: list[dict[str, object]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.trouble) or self.code == TESTS_FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="limit for all files together (%(default)g)")
    parser.add_argument("--files", nargs="+", default=[], help="names of files in tests/gpu; all of them without it")
    parser.add_argument("--print-page", action="store_true", help="write the page from what it says, and run nothing")
    asked, flags = parser.parse_known_args(arguments)
    known = {path.name: path for path in sorted(FOLDER.glob("test_*.py"))}
    if unknown := sorted(set(asked.files) - set(known)):
        parser.error(f"--files: no {', '.join(unknown)} in tests/gpu; there are {', '.join(known)}")
    if asked.print_page:
        write_page(pages.PAGE, {}, None)
        return 0
    out = Path(os.environ.get("GPU_OUT") or ROOT / "build" / "gpu")
    machine = find_machine()
    if machine is None:
        return without_gpu()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the file that runs is ended with its processes
    files = [known[name] for name in asked.files or known]
    parts = run_files(
        files, out, flags, seconds=asked.seconds, after_each=lambda parts: write_down(parts, machine, out, pages.PAGE)
    )
    return conclude(parts, machine, out, pages.PAGE)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def find_machine() -> str | None:
    """Return the GPU and the versions that figures belong to, in words, or None without a GPU."""
    told = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, check=False)
    lines = told.stdout.strip().splitlines()
    if not lines:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return f"{lines[-1]}, driver {driver}"


def without_gpu() -> int:
    """Say what is skipped; with a GPU that this Python cannot use it is an error."""
    has_gpu = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, check=False).returncode == 0
    if has_gpu:
        check = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, check=False)
        cause = check.stderr.strip().splitlines()[-1:] or ["torch.cuda.is_available() is false"]
        told = f"make gpu needs pytest, torch with CUDA, transformers and peft; {sys.executable}: {cause[0]}"
        sys.stderr.write(f"{told}. Try: make gpu PYTHON=...\n")
        return 2
    say(f"make gpu: no NVIDIA GPU here; skipped, with the claims that each file would show ({pages.PAGE.name} stays):")
    for name in sorted({claim.run for claim in CLAIMS}):
        say(f"  {name}: {', '.join(claim.id for claim in CLAIMS if claim.run == name)}")
    return 0


def run_files(
    files: Sequence[Path],
    out: Path,
    flags: Sequence[str],
    *,
    seconds: float,
    after_each: Callable[[Sequence[FileRun]], object] = lambda _: None,
) -> list[FileRun]:
    """Run the files one after the other, the ones that need vLLM last, until the time is used up.

    `after_each` gets the files so far, also if the last one is ended together with this program.
    """
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    parts: list[FileRun] = []
    for path in sorted(files, key=lambda path: ("vllm" in path.name, limit_of(path), path.name)):
        left = deadline - time.monotonic()
        part = FileRun(path)
        parts.append(part)
        if left < GRACE_SECONDS:
            part.trouble, part.out_of_time = f"no time was left of {seconds:g} s for all files", True
        else:
            try:
                run_file(part, out, flags, min(left, limit_of(path)))
            finally:
                after_each(parts)
        say(f"{path.name}: {part.trouble or outcome(part)}")
    return parts


def limit_of(path: Path) -> float:
    return SECONDS.get(path.name, OTHER_SECONDS)


def outcome(part: FileRun) -> str:
    if part.code == NOTHING_COLLECTED:
        return "nothing of it was selected"
    counts = {kind: sum(row.get("outcome") == kind for row in part.records) for kind in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) + f" in {part.seconds:.0f} s"


def run_file(part: FileRun, out: Path, flags: Sequence[str], limit: float) -> None:
    """Run one file with pytest, at most `limit` seconds long; its output goes to a log, its end to the terminal."""
    rows, log = out / f"{part.path.stem}.jsonl", out / f"{part.path.stem}.log"
    rows.unlink(missing_ok=True)
    environ = with_repository(os.environ, GPU_ROWS=str(rows))
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # any plugins may be installed, and none is needed
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*program(part.path), *flags],
            cwd=ROOT,
            env=environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            part.code = process.wait(limit)
        except subprocess.TimeoutExpired:
            part.trouble = f"{part.path.name} ran longer than its limit of {limit:.0f} s"
            part.out_of_time = limit < limit_of(part.path)
            end(process)
        except BaseException:
            part.trouble, part.out_of_time = f"{part.path.name} was ended together with make gpu", True
            end(process)
            raise
        finally:
            end_group(process)
            part.seconds = time.monotonic() - started
            part.records = records_in(rows)
    if part.code < 0:
        part.trouble = f"{part.path.name} was ended by {signal_name(-part.code)}"
    elif not part.trouble and part.code not in {0, TESTS_FAILED, NOTHING_COLLECTED}:
        part.trouble = f"{part.path.name} was ended by pytest with code {part.code}; {log.name} has the reason"
    if part.failed:
        say("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]))


def program(path: Path) -> list[str]:
    """Return the command that runs a file of checks; it is killed if this program is, and would keep the GPU else."""
    pytest = [sys.executable, "-m", "pytest", "-c", str(FOLDER / "pytest.ini"), "--rootdir", str(ROOT), str(path)]
    return [sys.executable, "-I", "-S", str(Path(die_with_parent.__file__)), str(os.getpid()), *pytest]


def records_in(path: Path) -> list[dict[str, object]]:
    """Return the records of a file of checks; a last line that was written in part is left out."""
    records: list[dict[str, object]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records


def end(process: subprocess.Popen[bytes]) -> None:
    """End a file's processes: first as by Ctrl-C, so that it stops the servers that it has started."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        end_group(process)
        process.wait()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a file's processes: what still computes would falsify the times of the next file."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def findings_of(parts: Sequence[FileRun], claims: Sequence[Claim] = CLAIMS) -> dict[str, Finding]:
    """Return what was found about each claim that was tried, by id."""
    found: dict[str, Finding] = {}
    for part in parts:
        for row in part.records:
            if "claim" in row:
                found[str(row["claim"])] = Finding(row["value"], row["reason"])  # type: ignore[arg-type]
        recorded_by = patterns_of(part.path)
        for claim in claims:
            if claim.run == part.path.name and claim.id not in found:
                reason = part.trouble or reason_of(claim, part, recorded_by)
                if reason:
                    found[claim.id] = Finding(None, reason, tried=not part.out_of_time)
    return found


def reason_of(claim: Claim, part: FileRun, recorded_by: Mapping[str, Sequence[re.Pattern[str]]]) -> str:
    """Return the reason why a claim has no value: that of the test that would have recorded it, if it was run."""
    for row in part.records:
        test = str(row.get("test", "")).rpartition("::")[2].partition("[")[0]
        mentions = any(pattern.fullmatch(claim.id) for pattern in recorded_by.get(test, ()))
        if row.get("outcome") in {"failed", "skipped"} and mentions:
            return str(row["reason"])
    return ""


def patterns_of(path: Path) -> dict[str, list[re.Pattern[str]]]:
    """Return the strings in each function of a file of checks, by the function's name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {function.name: list(patterns_in(function)) for function in functions}


def patterns_in(tree: ast.AST) -> Iterator[re.Pattern[str]]:
    """Yield the strings in a piece of source, with parts left open where it formats them."""
    if isinstance(tree, ast.JoinedStr):
        parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"[\w-]+" for part in tree.values]
        if any(isinstance(part, ast.Constant) for part in tree.values):
            yield re.compile("".join(parts))
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield re.compile(re.escape(tree.value))
    else:
        for node in ast.iter_child_nodes(tree):
            yield from patterns_in(node)


def conclude(parts: Sequence[FileRun], machine: str, out: Path, page: Path) -> int:
    """Print the table, and write it, and the page if a value was measured; return the exit code.

    It is 1 if a promise does not hold or a file failed, and 2 if no check was run.
    """
    found = write_down(parts, machine, out, page)
    say((out / TABLE).read_text(encoding="utf-8").rstrip())
    if not is_measured(found):
        say(f"No value was measured, so {page.name} stays as it is.")
    values = [(claim, found[claim.id].value) for claim in CLAIMS if claim.id in found]
    unheld = any(claim.promises and value is not None and not claim.holds(value) for claim, value in values)
    if unheld or any(part.failed for part in parts):
        return 1
    return 0 if any("outcome" in row for part in parts for row in part.records) else 2


def write_down(parts: Sequence[FileRun], machine: str, out: Path, page: Path) -> dict[str, Finding]:
    """Write the table of what was found, and the page if a value was measured; return what was found."""
    found = findings_of(parts)
    figures = [row["figure"] for part in parts for row in part.records if "figure" in row]
    lines = [machine, *pages.lines_of(found)] if found else [machine, "nothing was recorded"]
    if figures:
        lines += ["", *pages.as_table([("figure", "found", "expected"), *figures])]  # type: ignore[list-item]
    left = [claim.id for claim in CLAIMS if claim.id not in found]
    if left:
        lines += ["", f"not tried: {', '.join(left)}"]
    (out / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if is_measured(found):
        write_page(page, found, machine)
    (out / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    return found


def is_measured(found: Mapping[str, Finding]) -> bool:
    return any(finding.value is not None for finding in found.values())


def write_page(page: Path, found: Mapping[str, Finding], machine: str | None) -> None:
    """Write the page in one step: it is its own store, and a part of it would lose the rows of earlier runs."""
    stated = pages.marks(pages.documentation())
    before = page.read_text(encoding="utf-8")
    written = page.with_suffix(".part")
    written.write_text(pages.updated(before, found, machine, stated), encoding="utf-8")
    written.replace(page)


if __name__ == "__main__":
    sys.exit(main())
