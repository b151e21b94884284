"""The start of the server from a command line: first the checks, then the imports, then vLLM's own start.

Everything slow happens after the cheap checks, so a mistake is reported at once. The port is bound and answered before
the imports too, so that no other process can take it meanwhile and clients do not find the server absent. The command
line is made by `launcher.plan`, by `vllm_manager` (a server of the trainer's own), or by hand.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atropos_api.common.logs import setup_logging
from example_trainer.errors import CannotServe
from example_trainer.processes.ports import ServerSockets, open_sockets
from example_trainer.serving.config import ServerConfig, prepare_environment, read_config, vllm_arguments
from example_trainer.serving.startup import StartingAnswers, await_model, check_start
from example_trainer.serving.vllm.failure_cause import ask_for_cause, one_line, read_cause
from example_trainer.weight_protocol.manifest import remove_manifest
from example_trainer.weight_protocol.shm_header import remove_shared_files, sweep_stale_files

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "example_trainer.serving.vllm.worker.SharedWeightsWorker"


def run(argv: Sequence[str]) -> int:
    """Serve until stopped; return the exit code of the process."""
    config, rest = read_config(argv)
    setup_logging("vllm-server")
    logging.getLogger("example_trainer").setLevel(logging.INFO)  # libraries change the level of the root logger
    _note_ignored()
    for line in config.warnings():
        logger.warning("%s", line)
    check_start(config, os.environ)
    sockets = open_sockets(config.host, config.port, os.environ)
    config = config.model_copy(update={"port": sockets.listening.getsockname()[1]})
    starting = StartingAnswers(sockets.listening) if _answers_while_starting(sockets, rest) else None
    prepare_environment(os.environ, model_is_local=config.is_local)
    sweep_stale_files()
    boot_id = secrets.token_hex(8)
    cause = ask_for_cause(os.environ, boot_id)
    try:
        failure = _serve(config, rest, boot_id, cause, sockets, starting)
    finally:
        cause.unlink(missing_ok=True)
        _tidy(config, boot_id)
    if failure is None:
        return 0
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: vLLM's engine has failed: {failure}\n")
    return 1


def _serve(
    config: ServerConfig,
    rest: list[str],
    boot_id: str,
    cause: Path,
    sockets: ServerSockets,
    starting: StartingAnswers | None,
) -> str | None:
    """Serve until stopped; return the cause if the engine failed, else None."""
    began = time.monotonic()
    gc.disable()  # collection takes a fifth of the import time, and imported objects are never freed
    import uvloop

    from example_trainer.serving.vllm import compat

    on_cpu = compat.on_cpu()
    args = compat.parse_arguments(vllm_arguments(config, rest, on_cpu=on_cpu))
    if args.worker_extension_cls:
        raise CannotServe(
            f"--worker-extension-cls {args.worker_extension_cls}: the server sets this option itself; leave it out"
        )
    args.worker_extension_cls = WORKER_EXTENSION
    compat.check_internals()
    if config.enable_lora:
        compat.leave_out_launch_overlap_on_blackwell()
    if on_cpu:
        compat.import_for_fork()
        compat.inspect_models_here()
        compat.fork_engine_core()

    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.exceptions import EngineDeadError

    from example_trainer.serving.app import Serving

    gc.freeze()
    gc.enable()
    logger.info("imports took %.1f s", time.monotonic() - began)
    if config.await_model:
        await_model(config.model)
    serving = Serving(config, sockets, starting, boot_id=boot_id)
    entry.serve_http = serving.serve
    compat.use_socket(sockets.listening)
    try:
        uvloop.run(entry.run_server(args))
    except (ValueError, OSError, RuntimeError, EngineDeadError) as error:
        if serving.ready:
            raise
        logger.debug("vLLM did not start", exc_info=True)
        raise CannotServe(
            f"vLLM does not start with these options: {read_cause(cause) or _message_of(error)}"
        ) from error
    finally:
        serving.tidy()
    return serving.engine_end and (read_cause(cause) or serving.engine_end)


def _message_of(error: BaseException) -> str:
    """Return the essential part of an error from vLLM."""
    from pydantic import ValidationError

    text = "; ".join(str(item["msg"]) for item in error.errors()) if isinstance(error, ValidationError) else str(error)
    return one_line(text)


def _answers_while_starting(sockets: ServerSockets, rest: Sequence[str]) -> bool:
    """Return True if it replaces no server, whose clients would wait for it, and can answer without a certificate."""
    encrypted = any(flag.replace("_", "-").startswith("--ssl-") for flag in rest)
    return sockets.predecessor is None and not encrypted


def _tidy(config: ServerConfig, boot_id: str) -> None:
    remove_shared_files(boot_id)
    remove_manifest(config.manifest_directory(os.environ), boot_id)


def _note_ignored() -> None:
    if "VLLM_USE_V1" in os.environ:
        logger.warning("VLLM_USE_V1 is ignored: this vLLM has only one engine")
        del os.environ["VLLM_USE_V1"]
