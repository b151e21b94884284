"""The start of the server from a command line: first the checks, then the imports, then vLLM's own start.

Everything slow happens after the cheap checks, so a mistake is reported at once. The port is bound and answered before
the imports too, so that no other process can take it meanwhile and clients do not find the server absent. The command
line is made by `launcher.programs`, by `vllm_manager` (a server of the trainer's own), or by hand.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_api.common.logs import LogContext, setup_logging
from example_trainer.errors import CannotServe
from example_trainer.processes.gpus import serves_from_gpu
from example_trainer.processes.ports import ServerSockets, open_sockets
from example_trainer.processes.program_log import signal_name
from example_trainer.processes.scratch import server_scratch
from example_trainer.serving.config import (
    RegistrationIdentity,
    ServerConfig,
    prepare_environment,
    read_config,
    vllm_arguments,
    with_head_dtype,
)
from example_trainer.serving.registration import announce_start, withdraw
from example_trainer.serving.startup import (
    StartingAnswers,
    await_model,
    check_replaceable,
    check_sharing,
    check_start,
    described,
    is_latent,
)
from example_trainer.serving.vllm.failure_cause import ask_for_cause, one_line, read_cause
from example_trainer.weight_protocol.manifest import remove_manifest
from example_trainer.weight_protocol.shm_header import remove_shared_files, sweep_stale_files

if TYPE_CHECKING:
    from example_trainer.serving.app import ServerRun

logger = logging.getLogger(__name__)

_ENDED = re.compile(r"Failed core proc\(s\): \{('\w+': -(\d+))?")
"""vLLM's error after its engine has ended, with the signal's number if it was one and the exit code is known yet."""

WORKER_EXTENSION = "example_trainer.serving.vllm.worker.SharedWeightsWorker"


def run(argv: Sequence[str]) -> int:
    """Serve until stopped; return the exit code of the process."""
    config, rest = read_config(argv)
    logs = setup_logging("vllm-server", form=config.log_format)
    logging.getLogger("example_trainer").setLevel(logging.INFO)  # libraries change the level of the root logger
    _note_ignored()
    on_gpu = serves_from_gpu(os.environ)
    for line in config.warnings(on_gpu=on_gpu):
        logger.warning("%s", line)
    check_start(config, os.environ, on_gpu=on_gpu)
    sockets = open_sockets(config.host, config.port, os.environ)
    config = config.model_copy(update={"port": sockets.listening.getsockname()[1]})
    starting = StartingAnswers(sockets.listening) if _answers_while_starting(sockets, rest) else None
    prepare_environment(os.environ, model_is_local=config.is_local)
    if config.log_format == "json":
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # vLLM's records then go where ours go
    sweep_stale_files()
    boot_id = secrets.token_hex(8)
    cause = ask_for_cause(os.environ, boot_id)
    identity = None
    if config.broker_url is not None:
        identity = config.identify(boot_id, os.environ, encrypted=_encrypts(rest))
        announce_start(config.broker_url, identity, config.broker_source(os.environ))
    try:
        with server_scratch(os.environ):
            code, failure = _serve(config, rest, boot_id, cause, sockets, starting, logs, identity)
    finally:
        if config.broker_url is not None and identity is not None:
            withdraw(config.broker_url, identity, config.broker_source(os.environ))
        cause.unlink(missing_ok=True)
        _tidy(config, boot_id)
    if code:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: vLLM's engine has failed: {failure}\n")
    return code


def _serve(
    config: ServerConfig,
    rest: list[str],
    boot_id: str,
    cause: Path,
    sockets: ServerSockets,
    starting: StartingAnswers | None,
    logs: LogContext,
    identity: RegistrationIdentity | None,
) -> tuple[int, str]:
    """Serve until stopped; return the exit code, and the cause if the engine failed."""
    began = time.monotonic()
    gc.disable()  # collection takes a fifth of the import time, and imported objects are never freed
    args = _prepare_vllm(config, rest)
    from vllm.entrypoints.launchers.api_server import entry

    from example_trainer.serving.app import ServerRun
    from example_trainer.serving.vllm import compat

    gc.freeze()
    gc.enable()
    logger.info("imports took %.1f s", time.monotonic() - began)
    settings = sockets.wait_for_settings()
    if settings is None:
        return 0, ""
    config = ServerConfig.model_validate(config.model_dump() | settings)
    args.model = config.model
    if config.await_model:
        await_model(config.model)
    server_run = ServerRun(config, sockets, starting, boot_id=boot_id, logs=logs, identity=identity)
    entry.serve_http = server_run.serve
    compat.use_socket(sockets.listening)
    try:
        killed = _run(entry.run_server(args), server_run, cause)
    finally:
        server_run.tidy()
    if killed:
        return 128 + killed, f"it was killed by {signal_name(killed)} while it started"
    return (1, read_cause(cause) or server_run.engine_end) if server_run.engine_end else (0, "")


def _prepare_vllm(config: ServerConfig, rest: list[str]) -> Any:
    """Import vLLM and install the server's additions; return vLLM's arguments, checked."""
    from example_trainer.serving.vllm import compat, engine_core, patches

    on_cpu = compat.on_cpu()
    args = compat.parse_arguments(vllm_arguments(config, rest, on_cpu=on_cpu))
    if args.worker_extension_cls:
        raise CannotServe(
            f"--worker-extension-cls {args.worker_extension_cls}: the server sets this option itself; leave it out"
        )
    if config.shares(os.environ):
        check_sharing(config, os.environ, data_parallel_size=args.data_parallel_size)
    args.worker_extension_cls = WORKER_EXTENSION
    args.hf_overrides = with_head_dtype(args.hf_overrides, config.head_dtype)
    check_replaceable(
        config,
        os.environ,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        is_mla=is_latent(described(config.model)),
    )
    compat.check_internals()
    engine_core.install()  # a forked engine core has it from here
    patches.install_failing_calls()
    if config.enable_lora:
        compat.leave_out_launch_overlap_on_blackwell()
    if on_cpu:
        compat.import_for_fork()
        compat.inspect_models_here()
        if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn":
            compat.fork_engine_core()
    return args


def _run(server: Coroutine[Any, Any, None], server_run: ServerRun, cause: Path) -> int | None:
    """Run vLLM's server to its end; raise `CannotServe` if it does not start with these options.

    Return the number of the signal that killed its engine before it was ready: the options are not to blame then, so
    that a launcher may start the server again.
    """
    import uvloop
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        uvloop.run(server)
    except (ValueError, OSError, RuntimeError, EngineDeadError) as error:
        if server_run.ready:
            raise
        logger.debug("vLLM did not start", exc_info=True)
        ended, recorded = _ENDED.search(str(error)), read_cause(cause)
        if ended and ended[2]:
            return int(ended[2])
        if recorded is None and (ended or isinstance(error, EngineDeadError)):
            return signal.SIGKILL  # one that fails by itself records why
        raise CannotServe(f"vLLM does not start with these options: {recorded or _message_of(error)}") from error
    return None


def _message_of(error: BaseException) -> str:
    """Return the essential part of an error from vLLM."""
    from pydantic import ValidationError

    text = "; ".join(str(item["msg"]) for item in error.errors()) if isinstance(error, ValidationError) else str(error)
    return one_line(text)


def _answers_while_starting(sockets: ServerSockets, rest: Sequence[str]) -> bool:
    """Return True if requests get 503 during the start: not if clients wait in a predecessor's queue, nor with TLS."""
    return sockets.predecessor is None and not _encrypts(rest)


def _encrypts(rest: Sequence[str]) -> bool:
    return any(flag.replace("_", "-").startswith("--ssl-") for flag in rest)


def _tidy(config: ServerConfig, boot_id: str) -> None:
    remove_shared_files(boot_id)
    remove_manifest(config.manifest_directory(os.environ), boot_id)


_IGNORED = {
    "VLLM_USE_V1": "this vLLM has only one engine",
    "VLLM_SERVER_DEV_MODE": "its routes change weights and resume a paused engine without a token, also in the middle "
    "of a publish; use those under /bridge",
}
"""Variables of vLLM's, each with the reason."""


def _note_ignored() -> None:
    for name, reason in _IGNORED.items():
        if name in os.environ:
            logger.warning("%s is ignored: %s", name, reason)
            del os.environ[name]
