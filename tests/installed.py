"""The project as its users have it: its wheel in an environment of its own, which sees third-party packages only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment with the wheel; its programs are run from `cwd`, a folder with nothing of the repository."""

    wheel: Path
    programs: Path
    cwd: Path

    @property
    def variables(self) -> dict[str, str]:
        """The variables of this process, without those that lead Python elsewhere."""
        kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        return kept | {"PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}

    def run(self, *command: str, timeout_seconds: float = 120) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        return subprocess.run(
            [self.programs / program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.cwd,
            env=self.variables,
            timeout=timeout_seconds,
        )


def copy_of_the_source(folder: Path) -> Path:
    """Copy what git knows or would add, without `build`: setuptools would take files from there, deleted since."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def install_wheel(folder: Path) -> Installed:
    """Build the wheel from the repository and install it below `folder`.

    Third-party packages are this interpreter's: their folders are only added to the path, so that the editable
    installation of the repository in them, which needs a file with the suffix pth to be read, has no effect.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = copy_of_the_source(folder / "source")
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, text=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    home = folder / "venv"
    venv.create(home)
    site = next(home.glob("lib/python*/site-packages"))
    third_party = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    (site / "third_party.pth").write_text("".join(f"{path}\n" for path in third_party))
    install = [*pip, "--python", str(home / "bin/python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True, timeout=300)
    (folder / "elsewhere").mkdir()
    return Installed(wheel=wheel, programs=home / "bin", cwd=folder / "elsewhere")
