"""The version of this distribution, as `--version` of every command and the broker report it."""

from __future__ import annotations

from typing import Final

DISTRIBUTION: Final = "atropos-grpo"
NOT_INSTALLED: Final = "0+not.installed"
"""Reported where the packages are imported from a source tree that was never installed."""


def package_version() -> str:
    """The installed version of the distribution that all three packages belong to."""
    # Imported here: it costs more than all else that `--help` loads.
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def version_line(program: str) -> str:
    """What `program --version` prints, such as `run-api (atropos-grpo) 0.1.0`."""
    return f"{program} ({DISTRIBUTION}) {package_version()}"
