"""Environments that installed packages offer, by name: entry points of the group `atropos.environments`.

python -m environments.installed stories serve --env.group_size 8
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from atropos_api.common.cliconfig import ConfigError, nearest, run_cli

if TYPE_CHECKING:
    from environments.sdk.env import BaseEnv

ENTRY_POINT_GROUP = "atropos.environments"


def environment_names() -> list[str]:
    """Every name that a package offers an environment under."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def load_environment(name: str) -> type[BaseEnv]:
    """The environment called `name`."""
    from importlib.metadata import entry_points

    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        known = environment_names()
        listed = f"installed are {', '.join(known)}" if known else "none is installed"
        raise ConfigError(f"no environment {name!r}{nearest(name, known)}; {listed}")
    try:
        loaded: type[BaseEnv] = found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {name!r} cannot be loaded from {found[0].value}: {error}") from error
    return loaded


def main() -> NoReturn:
    sys.argv[0] = "environments.installed"
    run_cli(run)


def run(argv: list[str]) -> int:
    """Run `NAME VERB [flags]`."""
    if not argv or argv[0].startswith("-"):
        listed = "".join(f"  {name}\n" for name in environment_names()) or "  none\n"
        sys.stdout.write(f"usage: python -m environments.installed NAME VERB [flags]\n\ninstalled:\n{listed}")
        return 0
    from environments.sdk.cli import run_verb

    return run_verb(load_environment(argv[0]), argv[1:])


if __name__ == "__main__":
    main()
