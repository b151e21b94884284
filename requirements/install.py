"""Installs pinned packages into this interpreter's environment: with uv, and with pip where uv cannot.

`python requirements/install.py [--or-from INDEX] ARGUMENTS` takes the arguments of `pip install`; the further index is
asked if the configured registries lack a package. uv unpacks in parallel and leaves the modules as source: 2 GB take it
15 s, and pip 90 s, on the same two cores. Python compiles a module when it is first imported, a third of them in all;
compiling each took 27 s more. uv reads no configuration of pip, hence it is given the registries that pip is configured
with. The standard library is all that this file needs.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PIP = [sys.executable, "-m", "pip"]
SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration; a later one wins."""
FLAGS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraint",
}
"""uv's flag for each setting of pip's; one with several values is given once for each."""


def main(arguments: list[str]) -> int:
    """Try uv, uv with the further index, pip, and pip with the further index; only the last may complain."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--or-from", metavar="INDEX")
    options, asked = parser.parse_known_args(arguments)
    sources = [[], ["--extra-index-url", options.or_from]] if options.or_from else [[]]
    attempts = [
        [*installer, *source, *asked] for installer in (uv(), [*PIP, "install"]) if installer for source in sources
    ]
    for attempt in attempts[:-1]:
        if subprocess.run(attempt, check=False, capture_output=True, env=variables()).returncode == 0:
            return 0
    return subprocess.run([*attempts[-1], "--quiet"], check=False).returncode


def uv() -> list[str]:
    """Return the start of a command that installs with uv, which is installed first; empty if that fails."""
    pin = next(line for line in (HERE / "dev.txt").read_text().splitlines() if line.startswith("uv=="))
    if subprocess.run([*PIP, "install", "--no-deps", pin], check=False, capture_output=True).returncode != 0:
        return []
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    # As pip does it: the best version of all registries, not the first registry that has the package.
    return [*command, "--index-strategy", "unsafe-best-match", *uv_flags(pip_settings())]


def variables() -> dict[str, str]:
    """Return this process's variables; uv finds the certificates of pip's configuration in them."""
    settings = pip_settings()
    return {**({"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}), **os.environ}


def pip_settings() -> dict[str, str]:
    """Return the settings that pip has from files and variables; `pip config list` prints `global.index-url='URL'`."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in subprocess.check_output([*PIP, "config", "list"], text=True).splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        found.setdefault(section, {})[key] = ast.literal_eval(value)
    return {key: value for section in SECTIONS for key, value in found[section].items()}


def uv_flags(settings: dict[str, str]) -> list[str]:
    """Return the flags by which uv asks the registries of these settings of pip's."""
    return [part for key, flag in FLAGS.items() for value in settings.get(key, "").split() for part in (flag, value)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
