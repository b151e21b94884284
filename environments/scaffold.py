"""`atropos env init NAME`: a new environment as a package of its own, with tests that pass.

python -m environments.scaffold stories
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

from atropos_api.common.cliconfig import ConfigError, run_cli

TEMPLATES = Path(__file__).with_name("scaffold_templates")
NAME = re.compile(r"[a-z][a-z0-9_]*")
PLACES = {
    "environment.py.txt": "{name}_env.py",
    "tests.py.txt": "tests/test_{name}_env.py",
    "project.toml.txt": "pyproject.toml",
    "readme.md.txt": "README.md",
    "run.yaml.txt": "run.yaml",
}


def run(argv: Sequence[str]) -> int:
    """Write the environment `NAME` into a folder of that name."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("atropos env init takes one argument, the NAME of the environment")
    folder = write_environment(argv[0].replace("-", "_"), Path.cwd())
    sys.stdout.write(
        f"{folder}: now `pip install -e '{folder}[dev]'` and `pytest {folder}`; "
        f"`cd {folder} && atropos-grpo-run --config run.yaml` trains with it\n"
    )
    return 0


def write_environment(name: str, where: Path) -> Path:
    """Write the files of a new environment to a new folder below `where`."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name an environment; use small letters, digits and _, a letter first")
    folder = where / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name or remove it")
    words = {"name": name, "class_name": "".join(part.capitalize() for part in name.split("_")) + "Env"}
    with TemporaryDirectory(dir=where, prefix=f".{name}.") as temporary:
        for source, place in PLACES.items():
            target = Path(temporary, name, place.format(name=name))
            target.parent.mkdir(parents=True, exist_ok=True)
            text = (TEMPLATES / source).read_text(encoding="utf-8")
            target.write_text(Template(text).substitute(words), encoding="utf-8")
        return Path(temporary, name).rename(folder)


if __name__ == "__main__":
    run_cli(run)
