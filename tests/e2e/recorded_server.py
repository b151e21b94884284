"""An environment without a model: it submits recorded groups in their order, and goes on where it was when it restarts.

`python recorded_server.py serve --config FILE`, as the launcher starts an environment; ATROPOS_RECORDED names a file of
groups, one a line. Each group has a key of its own, so that the broker takes each once however often it is submitted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import yaml

from atropos_api.client import BrokerClient
from atropos_api.common.secrets import TokenSource
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import EnvironmentRequest

RECORDED_VARIABLE = "ATROPOS_RECORDED"
PACING_SECONDS = 2.0


def main(config: Path) -> None:
    settings = yaml.safe_load(config.read_text())["env"]
    lines = Path(os.environ[RECORDED_VARIABLE]).read_bytes().splitlines()
    groups = [msgspec.json.decode(line, type=Group) for line in lines]
    request = EnvironmentRequest(name="recorded", group_size=len(groups[0].tokens), max_token_length=512)
    token = TokenSource(os.environ.get("ATROPOS_TOKEN"))
    with BrokerClient(settings["rollout_server_url"], token=token, retry_seconds=600) as broker:
        broker.wait_until_ready()
        environment = broker.register_environment(request).environment_id
        for number, group in enumerate(groups):
            wait_for(broker, environment, "run")
            broker.submit(environment, [group], idempotency_key=f"recorded-{number}")
        wait_for(broker, environment, "finished")


def wait_for(broker: BrokerClient, environment: int, state: str) -> None:
    """Wait until there is room for a group, or until the run has ended, whatever is asked for."""
    pacing = broker.heartbeat(environment)
    while pacing.state != state or (state == "run" and not pacing.room_sequences):
        if pacing.state == "finished":
            sys.exit(0)
        pacing = broker.heartbeat(environment, revision=pacing.revision, wait_seconds=PACING_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--config") + 1]))
