"""Runs the real launcher with a trainer of two processes, which torchrun starts."""

from __future__ import annotations

from atropos_api.common.cliconfig import run_cli
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.programs import Programs
from example_trainer.launcher.run_file import read_settings
from example_trainer.run import carry_out

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def main(argv: list[str]) -> int:
    launch = plan_launch(read_settings(argv))
    launch.programs = Programs(trainer=(*TORCHRUN, "-m", "example_trainer.grpo"))
    return carry_out(launch, argv)


if __name__ == "__main__":
    run_cli(main)
