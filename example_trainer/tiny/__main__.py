"""`python -m example_trainer.tiny --task chain --seed 0 --out DIR`: make or find the tiny base model, describe it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from atropos_api.common.cliconfig import run_cli
from environments.tasks.arithmetic import TASK_NAMES
from example_trainer.tiny.cache import copy_base, ensure_base, find_base, read_report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m example_trainer.tiny", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--task", choices=TASK_NAMES, default="chain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="copy the model here; without it the folder of the model is named")
    parser.add_argument("--cache-dir", type=Path, help="default: $ATROPOS_CACHE or ~/.cache/atropos")
    options = parser.parse_args(argv)
    found = find_base(options.task, options.seed, options.cache_dir)
    path = found or ensure_base(options.task, options.seed, options.cache_dir)
    if options.out is not None:
        copy_base(path, options.out)
    report = read_report(path)
    sys.stdout.write(
        f"path {options.out or path}\n"
        f"sha256 {report.weights_sha256}\n"
        f"pass rate at T=1 {report.pass_rate:.3f}\n"
        f"greedy accuracy {report.greedy_accuracy:.3f}\n"
        f"mean length {report.mean_length_tokens:.1f} tokens\n"
        f"{'found' if found else f'made in {report.seconds:.0f} s'}\n"
    )
    return 0


if __name__ == "__main__":
    run_cli(main)
