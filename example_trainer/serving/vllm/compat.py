"""Everything that depends on vLLM's inner names, in one place, checked at start.

vLLM does not promise to keep them. `check_internals` looks up each one, so that a new release that moved one is
reported in a line naming it, not by an obscure failure in the middle of a run.
"""

from __future__ import annotations

import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, NoReturn, TypeVar

from atropos_api.common.cliconfig import ConfigError, nearest
from example_trainer.errors import CannotServe
from example_trainer.processes.die_with_parent import die_with_parent
from example_trainer.processes.ports import release_inherited
from example_trainer.serving.vllm.failure_cause import note_cause

T = TypeVar("T")
_BLACKWELL = 10  # compute capability
ENTRY_MODULE = "vllm.entrypoints.launchers.api_server.entry"


class DieWithParentProcess(ForkProcess):
    """A forked child that the kernel kills when its parent ends, and that holds none of its ports."""

    def start(self) -> None:
        self._atropos_parent = os.getpid()
        super().start()

    def run(self) -> None:
        die_with_parent(self._atropos_parent)
        release_inherited()
        note_cause()
        super().run()


class DieWithParentContext(ForkContext):
    """The fork start method with `DieWithParentProcess`."""

    Process = DieWithParentProcess


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_internals() -> None:
    """Raise `CannotServe` if this vLLM lacks a name that the server uses."""
    import importlib

    needed = {
        ENTRY_MODULE: ("run_server", "serve_http", "build_app", "setup_server"),
        "vllm.entrypoints.launchers.launcher": ("create_server_socket",),
        "vllm.v1.engine.core": (
            "EngineCore.pause_scheduler",
            "EngineCore.resume_scheduler",
            "EngineCore.set_weight_version",
        ),
        "vllm.v1.engine.core_client": (
            "AsyncMPClient.call_utility_async",
            "AsyncMPClient.call_utility_all_async",
            "AsyncMPClient._call_utility_async",
            "AsyncMPClient.add_request_async",
        ),
        "vllm.v1.engine.async_llm": ("AsyncLLM._add_request",),
        "vllm.v1.engine.detokenizer": ("FastIncrementalDetokenizer",),
        "vllm.v1.sample.sampler": ("Sampler.gather_logprobs", "Sampler.gather_specific_token_logprobs"),
        "vllm.v1.worker.gpu_input_batch": ("InputBatch.update_async_output_token_ids", "InputBatch.make_lora_inputs"),
        "vllm.v1.sample.thinking_budget_state": ("ThinkingBudgetStateHolder.sync_batch",),
        "vllm.v1.structured_output": ("StructuredOutputManager.grammar_init",),
        "vllm.v1.structured_output.backend_guidance": (
            "GuidanceBackend.allocate_token_bitmask",
            "GuidanceGrammar.fill_bitmask",
        ),
        "vllm.entrypoints.serve.engine.serving": ("BaseServing._check_model",),
        "vllm.v1.core.sched.scheduler": (
            "Scheduler.schedule",
            "Scheduler.update_from_output",
            "Scheduler.get_request_counts",
            "Scheduler._free_request",
        ),
        "vllm.v1.engine.input_processor": ("InputProcessor.process_inputs",),
        "vllm.outputs": ("WeightVersionSpan",),
        "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
        "vllm.model_executor.model_loader.reload.layerwise": ("get_layerwise_info", "_place_kernel_tensors"),
        "vllm.model_executor.layers.logits_processor": ("LogitsProcessor._apply_head",),
        "vllm.config": ("ModelConfig.head_dtype", "VllmConfig.use_v2_model_runner"),
    }
    for module_name, names in needed.items():
        found: Any = importlib.import_module(module_name)
        for name in names:
            target = found
            for part in name.split("."):
                target = getattr(target, part, None)
            if target is None:
                raise CannotServe(f"this vLLM has no {module_name}.{name}, which the server needs; use vLLM 0.32")


def fork_engine_core() -> None:
    """Make vLLM fork its engine core from this process on a CPU, so that it need not repeat the imports.

    vLLM insists on `spawn` for CPUs. Forking is safe: torch's thread pool has not been used here yet, and with one
    thread it never will be.
    """
    context = DieWithParentContext()
    modules: list[Any] = list(sys.modules.values())
    for module in modules:
        if getattr(module, "__name__", "").startswith("vllm.") and hasattr(module, "get_mp_context"):
            module.get_mp_context = lambda: context


def inspect_models_here() -> None:
    """Inspect a model's class in this process instead of a new one, which would import vLLM again."""
    from vllm.model_executor.models import registry

    def call(look: Callable[[], T]) -> T:
        return look()

    registry._run_in_subprocess = call  # noqa: SLF001  vLLM has no public hook for it


def import_for_fork() -> None:
    """Import the modules that the engine core will need, so that they are loaded after the fork."""
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401  imported for their effect


def parse_arguments(arguments: list[str]) -> Namespace:
    """Parse with vLLM's own parser and checks; a mistake becomes a one-line error."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm"))

    def error(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = error
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].split("=", 1)[0]
        known = [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001
        raise ConfigError(
            f"unknown option {flag}{nearest(flag.replace('_', '-'), known)} (vLLM does not have it either)"
        )
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as problem:
        raise ConfigError(" ".join(str(problem).split())) from problem
    assert isinstance(args, Namespace)
    return args


def leave_out_launch_overlap_on_blackwell() -> None:
    """Switch off vLLM's launch overlap on Blackwell: adapter kernels fail if one starts before the last has ended."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is not None and capability.major >= _BLACKWELL:
        os.environ.setdefault("VLLM_LORA_DISABLE_PDL", "1")


def use_socket(listening: socket.socket) -> None:
    """Make vLLM serve on a socket that listens already, instead of one of its own."""
    from vllm.entrypoints.launchers import launcher

    def create(_: tuple[str, int], *, reuse_port: bool) -> socket.socket:  # noqa: ARG001  vLLM's signature
        return listening

    launcher.create_server_socket = create


def end_engine(async_llm: Any) -> None:
    """Kill the idle engine at once: it has nothing to save, and vLLM's own shutdown takes seconds for no gain."""
    if async_llm.output_handler is not None:
        async_llm.output_handler.cancel()
    resources = async_llm.engine_core.resources
    resources.engine_dead = True
    manager = resources.engine_manager
    if manager is None:
        return
    manager.manager_stopped.set()  # so that its end is not reported as a failure
    for process in manager.processes:
        process.kill()
    for process in manager.processes:
        process.join()


def engine_processes(async_llm: Any) -> list[Any]:
    """Return the engine's processes as this process started them."""
    manager = async_llm.engine_core.resources.engine_manager
    return [] if manager is None else list(manager.processes)
