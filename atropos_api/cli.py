"""`run-api`: start a broker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

from atropos_api.common.cliconfig import ConfigError, load_config, run_cli, validate
from atropos_api.common.errors import Outage
from atropos_api.common.logs import setup_logging
from atropos_api.common.malloc import keep_freed_memory
from atropos_api.common.secrets import TokenSource
from atropos_api.config import BrokerConfig, check_token

DESCRIPTION = (
    "The trajectory broker: environments push scored groups, one trainer pulls numbered batches. One run is open at a "
    "time; a second concurrent run needs a second broker, with a port and a store of its own."
)


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and serve until a signal stops the process."""
    config = load_config(BrokerConfig, argv, prog="run-api", description=DESCRIPTION, section="api")
    source = TokenSource.settle(config.token, config.token_file, os.environ)
    if source.value is not None and source.file is None:
        try:
            check_token(source.value)
        except ValueError as error:
            raise ConfigError(f"{source.origin}: {error}") from None
    settled = {"token": None if source.file is not None else source.value, "token_file": source.file}
    config = validate(BrokerConfig, config.model_dump() | settled)
    logs = setup_logging("run-api", level=config.log_level, form=config.log_format)
    keep_freed_memory()
    # The server stack takes most of a second to import, which --help should not cost.
    from atropos_api.errors import StoreUnavailable
    from atropos_api.server.serve import serve

    try:
        return serve(config, logs)
    except StoreUnavailable as error:
        if not error.is_outage:
            raise
        raise Outage(str(error)) from error  # a Redis may start later than this broker


def main() -> NoReturn:
    run_cli(run)


if __name__ == "__main__":
    main()
