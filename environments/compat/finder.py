"""The import hook: Atropos' module names lead to ours, and transformers' chat templates give lists as they used to.

It is put in front of all others, so an installed `atroposlib` is not used either.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from environments.compat.names import ALIASES

TOKENIZERS = "transformers.tokenization_utils_base"


def install() -> None:
    """Answer Atropos' imports in this process from now on; calling it again changes nothing."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path[:0] = [AliasFinder(), ChatTemplateFinder()]
    loaded = sys.modules.get(TOKENIZERS)
    if loaded is not None:
        give_lists(loaded)


class AliasFinder(MetaPathFinder):
    """Finds the modules of `names.ALIASES`; any other name below `atroposlib` is said to be missing here."""

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
        # One without supplied modules below it is a package too: else Python says so, and not what there is.
        is_package = ALIASES[fullname] is None or any(name.startswith(f"{fullname}.") for name in ALIASES)
        return ModuleSpec(fullname, AliasLoader(ALIASES[fullname]), is_package=is_package)


class AliasLoader(Loader):
    """Fills a module with the public names of one of ours."""

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
    """Changes transformers' tokenizers when they are loaded, if they ever are."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TOKENIZERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenGiveLists(spec.loader)
        return spec


class _ThenGiveLists(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        give_lists(module)


def give_lists(tokenizers: ModuleType) -> None:
    """Let `apply_chat_template` return a plain list of ids unless a mapping is asked for."""
    cls = tokenizers.PreTrainedTokenizerBase
    original: Callable[..., Any] = cls.apply_chat_template
    if getattr(original, "gives_lists", False):
        return

    @functools.wraps(original)
    def apply_chat_template(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("return_dict", False)
        return original(self, *args, **kwargs)

    apply_chat_template.gives_lists = True  # type: ignore[attr-defined]
    cls.apply_chat_template = apply_chat_template
