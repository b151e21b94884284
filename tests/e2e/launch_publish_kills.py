"""Runs the real launcher with a trainer in which a process is killed at given calls of a publish.

The launcher starts this file again as the trainer. The next kill of the list is made once the run has gone on for some
steps since the last one; `publish-kills.txt` in the run directory has a line for each that was made.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil
import yaml

from atropos_api.common.cliconfig import run_cli
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.programs import Programs
from example_trainer.launcher.run_file import read_settings
from example_trainer.run import carry_out
from example_trainer.weight_protocol.client import ServerClient

MADE = "publish-kills.txt"


@dataclass(frozen=True)
class PublishKill:
    """A process that is killed before or after a call of the trainer to a server."""

    victim: Literal["trainer", "server"]
    moment: Literal["before", "after"]
    call: str
    steps: int = 2
    """Number of steps after the kill before this one."""


_AT_THE_PROOF = (
    PublishKill("trainer", "before", "generate", steps=0),
    PublishKill("trainer", "after", "generate", steps=0),
    PublishKill("server", "before", "generate", steps=0),
    PublishKill("server", "after", "generate", steps=0),
)
"""Kills at the proof of a server that has come back: it is asked for logprobs until it has passed."""
_JOINED = ("receive_broadcast", "begin_publish", "load_broadcast", "end_publish")
KILLS: dict[str, tuple[PublishKill, ...]] = {
    "shared_vllm": (
        *(PublishKill("server", "before", call) for call in _JOINED),
        PublishKill("server", "before", "join_broadcast", steps=0),  # of the server that has come back
        *_AT_THE_PROOF,
        *(PublishKill("server", "after", call) for call in _JOINED),
        PublishKill("trainer", "after", "join_broadcast", steps=0),
        *(PublishKill("trainer", "before", call) for call in _JOINED),
        *(PublishKill("trainer", "after", call) for call in _JOINED),
    ),
    "lora_only": (
        PublishKill("server", "before", "upload_adapter"),
        *_AT_THE_PROOF,
        PublishKill("server", "after", "upload_adapter"),
        PublishKill("trainer", "before", "upload_adapter"),
        PublishKill("trainer", "after", "upload_adapter"),
    ),
}
"""The kills of a run by its mode: none is waited for that depends on another one's moment."""


class Killer:
    """Makes the kills of a run, in the trainer."""

    def __init__(self, kills: tuple[PublishKill, ...], run_dir: Path) -> None:
        self._kills = kills
        self._made = run_dir / MADE
        self._metrics = run_dir / "metrics.jsonl"
        self._lock = threading.Lock()

    def note(self, client: ServerClient, call: str, moment: str) -> None:
        with self._lock:
            made = self._made.read_text().splitlines() if self._made.exists() else []
            if len(made) == len(self._kills):
                return
            kill, since = self._kills[len(made)], int(made[-1].split()[0]) if made else 0
            step = self._metrics.read_text().count("\n") if self._metrics.exists() else 0
            # A resumed run trains its last step again, so that there may be fewer than before.
            too_early = not step or (kill.steps > 0 and step - since < kill.steps)
            if (kill.call, kill.moment) != (call, moment) or too_early:
                return
            victim = os.getpid() if kill.victim == "trainer" else server_at(client.url)
            with self._made.open("a") as file:
                file.write(f"{step} {kill.victim} killed {moment} {call}\n")
            os.kill(victim, signal.SIGKILL)


def server_at(url: str) -> int:
    """Return the process id of the server that listens at an address of this machine."""
    port = urlsplit(url).port
    found = psutil.net_connections("tcp")
    pid = next(each.pid for each in found if each.status == "LISTEN" and each.laddr.port == port and each.pid)
    own = [psutil.Process(pid), *psutil.Process(pid).parents()]
    return int(next(each.pid for each in own if "example_trainer.vllm_api_server" in each.cmdline()))


def watched(killer: Killer, name: str) -> Any:
    """Return a method of the client that tells the killer before and after each call."""
    call = getattr(ServerClient, name)

    @functools.wraps(call)
    def method(client: ServerClient, *arguments: Any, **named: Any) -> Any:
        killer.note(client, name, "before")
        answer = call(client, *arguments, **named)
        killer.note(client, name, "after")
        return answer

    return method


def train(argv: list[str]) -> None:
    from example_trainer.cli import main

    settings = yaml.safe_load(Path(argv[argv.index("--config") + 1]).read_text())["trainer"]
    kills = KILLS[settings["weight_bridge_mode"]]
    killer = Killer(kills, Path(settings["run_dir"]))
    for name in {kill.call for kill in kills}:
        setattr(ServerClient, name, watched(killer, name))
    sys.argv = ["atropos-grpo", *argv]
    main()


def launch(argv: list[str]) -> int:
    planned = plan_launch(read_settings(argv))
    planned.programs = Programs(trainer=(str(Path(__file__).absolute()), "train"))
    return carry_out(planned, argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
    else:
        run_cli(launch)
