"""`make` takes the GPU only if driver and GPU are new enough, and otherwise says why not; Python may write bytecode."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


SERVES = "580.65.06, 9.0, 80000"
"""The figures of a driver and a card that can serve."""


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def with_driver(directory: Path, figures: str | None) -> dict[str, str]:
    """Return variables under which the driver answers with these figures; None: it fails."""
    listed = 'case "$1" in -L) echo "GPU 0: NVIDIA (UUID: GPU-5a3e)";; *) echo "$FIGURES";; esac'
    script(directory / "nvidia-smi", "exit 9" if figures is None else listed)
    return os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "FIGURES": figures or ""}


def platform(directory: Path, figures: str | None, *more: str, makefile_in: Path = ROOT) -> str:
    """Return make's decision if the driver answers these figures, or fails (None)."""
    environment = with_driver(directory, figures)
    shown = "shown: ; @echo '$(PLATFORM) $(VENV) $(GPU_REFUSED)'"
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), f"--eval={shown}", "shown", *more]
    result = subprocess.run(command, cwd=makefile_in, env=environment, capture_output=True, text=True, check=True)
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("figures", "decided"),
    [
        (None, "cpu .venv"),
        (SERVES, "gpu .venv"),
        ("590.1, 12.0, 4096", "gpu .venv"),
        ("580.65.06, [N/A], [N/A]", "gpu .venv"),
        ("570.124, 9.0, 80000", "cpu .venv its driver is 570.124, and the pinned torch needs 580 or newer"),
        ("580.65.06, 7.5, 15000", "cpu .venv its compute capability is 7.5, and 8.0 is needed"),
        ("580.65.06, 9.0, 310", "cpu .venv it has 310 MiB free, and 4096 are needed"),
    ],
)
def test_a_gpu_is_taken_only_if_driver_and_card_can_serve(tmp_path: Path, figures: str | None, decided: str) -> None:
    assert platform(tmp_path, figures, makefile_in=tmp_path) == decided


def test_the_two_builds_of_vllm_have_an_environment_each(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed-gpu").touch()
    assert platform(tmp_path, SERVES, makefile_in=tmp_path) == "gpu .venv"
    assert platform(tmp_path, None, makefile_in=tmp_path) == "cpu .venv-cpu"
    assert platform(tmp_path, SERVES, "PLATFORM=cpu", makefile_in=tmp_path).startswith("cpu .venv-cpu")


def test_modules_are_compiled_once_though_the_shell_forbids_to_write_bytecode(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    shown = "shown: ; @echo \"'$$PYTHONDONTWRITEBYTECODE'\""
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), f"--eval={shown}", "shown"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "''\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment for GPUs is installed, with stand-ins for its programs."""
    made = tmp_path / "checkout"
    made.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (made / name).symlink_to(ROOT / name)
    environment(made / ".venv", "gpu", torch_works=True)
    return made


def environment(directory: Path, platform: str, *, torch_works: bool) -> None:
    script(directory / "bin" / "python", f'echo "python $*"; exit {0 if torch_works else 1}')
    script(directory / "bin" / "pip", 'echo "pip $*"')
    demo = 'echo "demo on a $PLATFORM, visible: ${CUDA_VISIBLE_DEVICES-all}"'
    script(directory / "bin" / "atropos-grpo-run", f"PLATFORM={platform}", demo)
    (directory / f".installed-{platform}").touch()


def make(checkout: Path, *arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    variables = with_driver(checkout.parent, SERVES)
    return subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, check=True).stdout


def test_the_demo_runs_on_the_gpu_if_the_installed_torch_can_use_it(checkout: Path) -> None:
    assert make(checkout, "demo").endswith("demo on a gpu, visible: all\n")


def test_the_demo_runs_on_the_cpu_and_says_so_if_the_installed_torch_cannot_use_the_gpu(checkout: Path) -> None:
    environment(checkout / ".venv", "gpu", torch_works=False)
    environment(checkout / ".venv-cpu", "cpu", torch_works=True)
    told = make(checkout, "demo")
    assert "The GPU is left aside: the installed torch cannot use it. The demo runs on the CPU" in told
    assert told.endswith("demo on a cpu, visible: \n")


@pytest.mark.parametrize("target", ["test", "test-all", "chaos"])
def test_the_tests_run_on_the_cpu_of_a_machine_with_a_gpu(checkout: Path, target: str) -> None:
    """They serve adapters in float32, which a server on a GPU refuses."""
    environment(checkout / ".venv-cpu", "cpu", torch_works=True)
    script(checkout / ".venv-cpu" / "bin" / "python", 'echo "$0 $*; visible: ${CUDA_VISIBLE_DEVICES-all}"')
    last = make(checkout, target).splitlines()[-1]
    assert last.startswith(".venv-cpu/bin/python")
    assert last.endswith("; visible: ")


def test_the_checks_on_a_gpu_install_what_they_need_into_the_environment_of_the_demo(checkout: Path) -> None:
    told = make(checkout, "gpu").splitlines()
    assert told[0] == "python requirements/install.py --no-deps --requirement requirements/dev.txt"
    assert "tests/gpu/run.py" in told[1]
    assert make(checkout, "gpu").splitlines() == [told[1]], "once"


def test_an_interpreter_of_the_users_own_is_left_as_it_is(checkout: Path) -> None:
    own = checkout / "own-python"
    script(own, 'echo "own $*"')
    assert make(checkout, "gpu", f"PYTHON={own}").split() == ["own", "tests/gpu/run.py"]
