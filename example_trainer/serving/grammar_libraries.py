"""Guided decoding by the library that was chosen for each request.

vLLM chooses one for each request (xgrammar, or another where that one cannot take the grammar), and then compiles all
of them with the first request's choice, whichever it was: what came first on a server decided which grammars it took.
Here each library has a manager of its own. They write the same form of token mask, so one batch may mix them.
"""

from __future__ import annotations

import copy
from typing import Any

_INSTALLED = "atropos_installed"
_MANAGERS = "atropos_managers"


def install() -> None:
    """Wrap the beginning of a grammar, once a process."""
    from vllm.v1.structured_output import StructuredOutputManager

    if hasattr(StructuredOutputManager, _INSTALLED):
        return
    setattr(StructuredOutputManager, _INSTALLED, True)
    StructuredOutputManager.grammar_init = _by_library(StructuredOutputManager.grammar_init)


def _by_library(begin: Any) -> Any:
    def beginning(manager: Any, request: Any) -> None:
        if request.structured_output_request is not None:
            begin(_manager_for(manager, request.sampling_params.structured_outputs._backend), request)  # noqa: SLF001

    return beginning


def _manager_for(manager: Any, library: str) -> Any:
    """The first library's is vLLM's own, which makes the masks of all; the others share everything but the library."""
    managers = vars(manager).setdefault(_MANAGERS, {})
    if library not in managers:
        managers[library] = copy.copy(manager) if managers else manager
        if managers[library] is not manager:
            managers[library].backend = None
    return managers[library]
