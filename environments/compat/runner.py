"""Runs an environment's file that was written for Atropos: as a script, with imports of `atroposlib` resolved to our
modules.

`ALIASES` maps each module name of Atropos to the module of ours that provides it; a new name is one line there. The
import hook precedes all other finders, so an installed `atroposlib` is not used. A second hook makes transformers'
chat templates return lists of ids, as they did when these environments were written.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from atropos_api.common.cliconfig import ConfigError, run_cli
from environments.sdk.base_env import BaseEnv

ENVS = "environments.compat.envs"
REWARDS = "environments.compat.rewards"
SERVERS = "environments.compat.servers"
UTILS = "environments.compat.utils"

ALIASES: Mapping[str, str | None] = {
    "atroposlib": None,
    "atroposlib.api": None,
    "atroposlib.envs": None,
    "atroposlib.envs.base": ENVS,
    "atroposlib.envs.constants": SERVERS,
    "atroposlib.envs.eval": ENVS,
    "atroposlib.envs.reward_fns": REWARDS,
    "atroposlib.envs.reward_fns.combined_reward": REWARDS,
    "atroposlib.envs.reward_fns.registry": REWARDS,
    "atroposlib.envs.reward_fns.reward_function": REWARDS,
    "atroposlib.envs.server_handling": None,
    "atroposlib.envs.server_handling.managed_server": SERVERS,
    "atroposlib.envs.server_handling.managed_server_proxy": SERVERS,
    "atroposlib.envs.server_handling.openai_server": SERVERS,
    "atroposlib.envs.server_handling.proxy_client": SERVERS,
    "atroposlib.envs.server_handling.server_baseline": SERVERS,
    "atroposlib.envs.server_handling.server_manager": SERVERS,
    "atroposlib.envs.server_handling.sglang_server": SERVERS,
    "atroposlib.envs.server_handling.trl_vllm_server": SERVERS,
    "atroposlib.envs.server_handling.vllm_server": SERVERS,
    "atroposlib.envs.teacher_distillation_env": ENVS,
    "atroposlib.frontend": None,
    "atroposlib.frontend.jsonl2html": UTILS,
    "atroposlib.type_definitions": ENVS,
    "atroposlib.utils": None,
    "atroposlib.utils.advantages": UTILS,
    "atroposlib.utils.best_of_n_selection": UTILS,
    "atroposlib.utils.io": UTILS,
    "atroposlib.utils.message_history_utils": UTILS,
    "atroposlib.utils.metrics": UTILS,
    "atroposlib.utils.tokenize_for_trainer": UTILS,
    "atroposlib.utils.tool_call_parser": UTILS,
}
"""None marks a package that contains only submodules."""


TOKENIZERS = "transformers.tokenization_utils_base"


def install() -> None:
    """Resolve Atropos' imports in this process from now on; a second call changes nothing."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path[:0] = [AliasFinder(), ChatTemplateFinder()]
    loaded = sys.modules.get(TOKENIZERS)
    if loaded is not None:
        give_lists(loaded)


class AliasFinder(MetaPathFinder):
    """Finds the modules of `ALIASES`; raises `ModuleNotFoundError` for any other name below `atroposlib`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "atroposlib":
            return None
        if fullname not in ALIASES:
            raise ModuleNotFoundError(
                f"{fullname} is not provided; there are {', '.join(sorted(ALIASES))}",
                name=fullname,
            )
        # A package with no supplied submodules is marked too: otherwise Python would report that it is not a package,
        # without the list above.
        is_package = ALIASES[fullname] is None or any(name.startswith(f"{fullname}.") for name in ALIASES)
        return ModuleSpec(fullname, AliasLoader(ALIASES[fullname]), is_package=is_package)


class AliasLoader(Loader):
    """Fills a module with the public names of our module."""

    def __init__(self, source: str | None) -> None:
        self._source = source

    def exec_module(self, module: ModuleType) -> None:
        if self._source is None:
            return
        source = importlib.import_module(self._source)
        for name in source.__all__:
            setattr(module, name, getattr(source, name))
        module.__doc__ = source.__doc__


class ChatTemplateFinder(MetaPathFinder):
    """Patches transformers' tokenizers when they are imported, if ever."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TOKENIZERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        give_lists(module)


def give_lists(tokenizers: ModuleType) -> None:
    """Make `apply_chat_template` return a plain list of ids unless the caller asks for a mapping."""
    cls = tokenizers.PreTrainedTokenizerBase
    original: Callable[..., Any] = cls.apply_chat_template
    if getattr(original, "returns_lists", False):
        return

    @functools.wraps(original)
    def apply_chat_template(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("return_dict", False)
        return original(self, *args, **kwargs)

    apply_chat_template.returns_lists = True  # type: ignore[attr-defined]
    cls.apply_chat_template = apply_chat_template


USAGE = "usage: atropos-compat FILE {serve,process,evaluate,validate} [flags]"


def main() -> NoReturn:
    """Run the command `atropos-compat`, which also works in a folder that contains a folder `environments`."""
    sys.argv[0] = "atropos-compat"  # until the name of the environment's file replaces it
    run_cli(run)


def run(argv: list[str]) -> int:
    """Run `FILE VERB [flags]`; a file that calls no `cli()` itself has its only environment run."""
    if not argv or argv[0] in {"-h", "--help"}:
        sys.stdout.write(f"{USAGE}\n\nFILE is an environment written for Atropos; flags follow the verb.\n")
        return 0
    path = Path(argv[0])
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; {USAGE}")
    install()
    # Worker processes need the aliases too, and only forked ones inherit them.
    multiprocessing.set_start_method("fork", force=True)
    with _as_script(path, argv[1:]):
        names = _execute(path)
        _only_environment(names, path).cli()
    return 0


def _execute(path: Path) -> dict[str, Any]:
    package = _package_of(path)
    if package is None or not _imports_relatively(path):
        return runpy.run_path(str(path), run_name="__main__")
    return runpy.run_module(package, run_name="__main__", alter_sys=True)


@contextmanager
def _as_script(path: Path, arguments: list[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as for a script; parent folders named `environments` extend our package."""
    folder = path.resolve().parent
    argv, places = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(folder))
    ours = importlib.import_module("environments").__path__
    known = list(ours)
    for parent in folder, *folder.parents:
        if parent.name == "environments" and str(parent) not in known:
            ours.insert(0, str(parent))  # their file takes precedence over ours of the same name
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places
        ours[:] = known


def _imports_relatively(path: Path) -> bool:
    return any(line.startswith("from .") for line in path.read_text(encoding="utf-8").splitlines())


def _package_of(path: Path) -> str | None:
    """Return the dotted name of a file inside packages, and put the outermost package's folder on `sys.path`."""
    parts = [path.stem]
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file():
        parts.append(folder.name)
        folder = folder.parent
    if len(parts) == 1:
        return None
    sys.path.insert(0, str(folder))
    return ".".join(reversed(parts))


def _only_environment(names: dict[str, Any], path: Path) -> type[BaseEnv]:
    found = [
        value
        for value in names.values()
        if isinstance(value, type)
        and issubclass(value, BaseEnv)
        and value.__module__ in {"__main__", names["__name__"]}
    ]
    leaves = [cls for cls in found if not any(other is not cls and issubclass(other, cls) for other in found)]
    if len(leaves) != 1:
        listed = ", ".join(cls.__name__ for cls in leaves) or "none"
        raise ConfigError(f"{path}: it calls no cli() and defines not one environment but {listed}")
    return leaves[0]
