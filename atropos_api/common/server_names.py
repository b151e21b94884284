"""How a run file names an environment server: by a file, a module, or the name under which a package offers it."""

from __future__ import annotations


def server_stem(name: str) -> str:
    """What the names of one server have in common: `arithmetic_server` of its file as of its module."""
    return name.removesuffix(".py").replace("/", ".").rpartition(".")[2]
