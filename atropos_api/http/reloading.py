"""`run-api --reload`: a fresh process at each change of the broker's own source, over the same store and socket."""

from __future__ import annotations

import functools
import logging
import socket
import sys
from pathlib import Path

import uvicorn
from uvicorn.supervisors import ChangeReload

from atropos_api.common.errors import AtroposError
from atropos_api.common.logs import setup_logging
from atropos_api.config import BrokerConfig
from atropos_api.store.opening import open_store

logger = logging.getLogger(__name__)


def serve_reloading(config: BrokerConfig, listener: socket.socket) -> int:
    """Start a child that serves, and start it anew whenever a source file has changed, until a signal comes."""
    if config.store == "memory":
        logger.warning("--store memory is emptied at each reload; name a directory to keep groups and runs")
    elif config.fresh:
        for part in reversed(open_store(config.store, fsync=config.fsync, fresh=True)):
            part.close()
    setup = uvicorn.Config(
        "unused", reload=True, reload_dirs=[str(Path(__file__).parents[1])], log_config=None, log_level="info"
    )
    child = functools.partial(serve_child, config.model_copy(update={"reload": False, "fresh": False}))
    ChangeReload(setup, target=child, sockets=[listener]).run()
    return 0


def serve_child(config: BrokerConfig, *, sockets: list[socket.socket]) -> None:
    # Imported here, in the new process, so that it is the changed source that runs.
    from atropos_api.http.serve import serve_on

    setup_logging("run-api", level=config.log_level)
    try:
        serve_on(config, sockets[0])
    except AtroposError as error:
        logger.error("%s", error)  # noqa: TRY400 - the line says all there is to say
        sys.exit(2)
