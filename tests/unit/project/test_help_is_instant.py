"""`--help` of every command takes under a second of computing and loads no heavy library."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "vllm", "transformers", "fastapi")
COMMANDS = {
    "run-api": ["atropos_api"],
    "atropos-grpo": ["example_trainer.grpo"],
    "atropos-grpo-run": ["example_trainer.run"],
    "atropos-sft": ["example_trainer.sft"],
    "atropos": ["example_trainer.commands.main"],
    "vllm_api_server": ["example_trainer.vllm_api_server"],
    "arithmetic_server serve": ["environments.arithmetic_server", "serve"],
}
PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
loaded = [name for name in {heavy!r} if name in sys.modules]
sys.exit(f"imported {{loaded}}" if loaded else code)
"""


def _children_seconds() -> float:
    """Return the CPU time of ended children; wall time would depend on the machine's other load."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_help_takes_under_a_second_of_computing_and_imports_nothing_heavy(command: str) -> None:
    seconds = []
    for _ in range(3):
        before = _children_seconds()
        result = subprocess.run(
            [sys.executable, "-c", PROBE.format(heavy=HEAVY), *COMMANDS[command], "--help"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=ROOT,
        )
        seconds.append(_children_seconds() - before)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("usage: ")
    assert min(seconds) < 1.0


SCRIPTS_AND_MODULES = {
    "example_trainer/grpo.py": "example_trainer.grpo",
    "example_trainer/run.py": "example_trainer.run",
    "example_trainer/vllm_api_server.py": "example_trainer.vllm_api_server",
    "environments/arithmetic_server.py": "environments.arithmetic_server",
}


def _help_of(arguments: list[str], cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, *arguments, "--help"], capture_output=True, text=True, check=False, timeout=60, cwd=cwd
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("script", SCRIPTS_AND_MODULES)
def test_by_path_by_module_and_from_its_own_folder_a_command_gives_the_same_help(script: str) -> None:
    verb = ["serve"] if "environments" in script else []
    by_module = _help_of(["-m", SCRIPTS_AND_MODULES[script], *verb], ROOT)
    assert _help_of([script, *verb], ROOT) == by_module
    path = ROOT / script
    assert _help_of([path.name, *verb], path.parent) == by_module
