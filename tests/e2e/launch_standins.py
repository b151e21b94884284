"""Runs the real launcher over stand-ins for its programs, as a program that tests can kill."""

from __future__ import annotations

from pathlib import Path

from atropos_api.common.cliconfig import run_cli
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.programs import Programs
from example_trainer.launcher.run_file import read_settings
from example_trainer.run import carry_out

STANDINS = str(Path(__file__).with_name("standins.py"))
REGISTERED = str(Path(__file__).with_name("registered_standin.py"))


def main(argv: list[str]) -> int:
    own_environment = [] if "--atropos-url" in argv else ["--env.server", STANDINS]
    launch = plan_launch(read_settings([*own_environment, *argv]))
    if "--registered-servers" in argv:  # which a stand-in for the broker does not know
        launch.programs = Programs(vllm=(REGISTERED,), trainer=(STANDINS, "trainer"))
        return carry_out(launch, argv)
    launch.programs = Programs(broker=(STANDINS, "broker"), vllm=(STANDINS, "vllm"), trainer=(STANDINS, "trainer"))
    return carry_out(launch, argv)


if __name__ == "__main__":
    run_cli(main)
