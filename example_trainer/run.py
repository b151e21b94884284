"""`atropos-grpo-run`, `python -m example_trainer.run`: one command starts broker, vLLM, environment and trainer.

    atropos-grpo-run --config configs/demo.yaml
    atropos-grpo-run --config configs/demo.yaml --seed 1 --training-steps 20 --env.group_size 4 --dry-run
    VLLM_ENABLE_SHARED_WEIGHTS=1 python -m example_trainer.run --model-name M --atropos-url URL --training-steps 30

The last form starts only vLLM and the trainer; you start broker and environments. Nothing heavy is imported here: every
program runs in its own process.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if __package__ in {None, ""}:
    # Started by path: packages must be imported from the parent of this file's folder, not from the folder itself.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from atropos_api.common.cliconfig import ConfigError, run_cli
from atropos_api.common.secrets import redact, redact_arguments, redact_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from example_trainer.launcher.launch import Launch
    from example_trainer.launcher.run_file import RunSettings


SUMMARY_WIDTH = 100


def main() -> NoReturn:
    run_cli(run)


def run(argv: list[str]) -> int:
    """Launch the run that `argv` describes and return its exit code."""
    from example_trainer.launcher.endpoints import fit_to_gpu
    from example_trainer.launcher.run_dir import require_own_package
    from example_trainer.launcher.run_file import read_settings

    require_own_package()
    settings, sentence = fit_to_gpu(read_settings(argv))
    if sentence:
        sys.stderr.write(f"atropos-grpo-run: {sentence}\n")
    from example_trainer.launcher.preflight import plan_launch

    launch = plan_launch(settings)
    # `--dry-run` describes a layout also on a machine on which it does not fit.
    if not settings.trainer.dry_run or settings.layout is None:
        _refuse_large(settings)
    if settings.trainer.dry_run:
        sys.stdout.write(describe(launch))
        return 0
    return carry_out(launch, argv)


def carry_out(launch: Launch, argv: Sequence[str]) -> int:
    """Run the launch and print its summary, or the error that ended it with the command that goes on from there."""
    from rich.console import Console

    from example_trainer.launcher.stop_request import Interrupted
    from example_trainer.launcher.summary import as_table
    from example_trainer.processes.child import ChildFailed

    view = launch.settings.trainer.view
    for remark in launch.settings.remarks if view != "quiet" else ():
        sys.stdout.write(f"{json.dumps({'event': 'remark', 'text': remark}) if view == 'json' else remark}\n")
    sys.stdout.flush()
    try:
        summary = launch.go()
    except (ChildFailed, Interrupted, OSError) as error:
        place = f"; the run directory is {launch.run.root}" if isinstance(error, OSError) else ""
        # It may hold the last lines of a program's log, and with them a traceback of a library.
        sys.stderr.write(f"atropos-grpo-run: error: {redact_text(str(error))}{place}\n")
        if launch.run.metrics.exists():
            sys.stderr.write(
                f"atropos-grpo-run: {next_start(argv, launch, failed=not isinstance(error, Interrupted))}\n"
            )
        return 1 if isinstance(error, OSError) else error.exit_code
    if view == "json":
        ended = {"event": "summary", **asdict(summary), "run_dir": str(launch.run.root), "notes": launch.notes}
        sys.stdout.write(f"{json.dumps(ended)}\n")
        return 0
    Console(width=SUMMARY_WIDTH).print(as_table(summary))
    sys.stdout.write("\n".join([*launch.notes, *places_of(launch)]) + "\n")
    return 0


def next_start(argv: Sequence[str], launch: Launch, *, failed: bool) -> str:
    """Return how to go on after a launch that did not reach its end; `failed` is False if it was stopped."""
    from example_trainer.launcher.run_dir import find_checkpoint

    config = launch.settings.trainer
    if find_checkpoint(config.save_path or launch.run.root) is not None:
        return f"to go on from its last checkpoint: {resume_command(argv, launch)}"
    # A new run is refused in a directory that holds metrics.
    place = " and another --run-dir" if config.run_dir is not None and config.resume is None else ""
    cause = "correct the cause, then " if failed else ""
    return f"there is no checkpoint yet to go on from; {cause}start again with the same command{place}"


def resume_command(argv: Sequence[str], launch: Launch) -> str:
    """Return the command line that continues this run; secrets in it are masked."""
    words, skipped = [], False
    for word in redact_arguments(argv):
        replaced = word.partition("=")[0].replace("_", "-") in {"--run-dir", "--output-dir", "--resume"}
        if not replaced and not skipped:
            words.append(word)
        skipped = replaced and "=" not in word
    return shlex.join([program("atropos-grpo-run"), *words, "--run-dir", str(launch.run.root), "--resume", "auto"])


def program(name: str) -> str:
    """Return the name of an installed program, or its path where the shell does not find it by name."""
    beside = Path(sys.executable).parent / name
    return name if shutil.which(name) is not None or not beside.exists() else str(beside)


def places_of(launch: Launch) -> list[str]:
    """Return the last lines of a run's output: its paths on disk and suggested next commands."""
    root, atropos = shlex.quote(str(launch.run.root)), shlex.quote(program("atropos"))
    return [
        f"run directory: {launch.run.root}",
        *([f"picture: {launch.run.plot}"] if launch.run.plot.exists() else []),
        *launch.pages,
        f"next: {atropos} report {root} shows this again",
        f"next: {atropos} view {root} opens its page: curves, and answers token by token, the worst first",
        f"next: {atropos} env init NAME begins an environment of your own (docs/howto/your-own-environment.md)",
    ]


def describe(launch: Launch) -> str:
    """Return the dry-run text: each program's command line, added environment variables and settings."""
    from example_trainer.launcher.environment_check import FACTS_SECONDS, EnvironmentCheck
    from example_trainer.launcher.preflight import dry_plan, local_bases
    from example_trainer.launcher.run_dir import as_plain_data

    plan = dry_plan(launch)
    with EnvironmentCheck(launch.settings, plan) as check:
        check.refuse_unusable(limit_seconds=FACTS_SECONDS)
    blocks = [f"run directory: {launch.run.root}", *launch.settings.remarks, *_layout_of(launch), _fleet_of(launch)]
    for spec in (*(base.spec for base in local_bases(launch.settings)), *plan.children):
        shown = redact(spec.environment)
        added = "".join(f"{name}={shlex.quote(value)} " for name, value in shown.items())
        content = plan.settings_of(spec.name)
        text = yaml.safe_dump(as_plain_data(content), sort_keys=False) if content else ""
        indented = "".join(f"\n    {line}" for line in text.splitlines())
        blocks.append(f"{spec.name}:\n  {added}{shlex.join(spec.command)}{indented}")
    return "\n".join(blocks) + "\n"


def _refuse_large(settings: RunSettings) -> None:
    """Raise `ConfigError` for more than the one trainer process that the launcher starts on this host."""
    if (count := settings.trainer.world_size) > 1 and not settings.placement.is_ray:
        said = f"--world-size {count}" if settings.layout is None else f"placement: the layout has {count} workers"
        raise ConfigError(
            f"{said}, and atropos-grpo-run starts one trainer process on this host; use --placement ray "
            "(docs/howto/ray.md), or start the others with torchrun, and servers with vllm_api_server --broker-url "
            "(docs/howto/servers-that-come-and-go.md)"
        )


def _fleet_of(launch: Launch) -> str:
    """Return the number of inference servers, and the numbers that `atropos scale` takes."""
    from example_trainer.launcher.fleet_plan import FleetRecord, limits_of

    config = launch.settings.trainer
    limits = limits_of(launch.settings, os.environ)
    return limits.describe(FleetRecord.read(launch.run, limits, resumes=config.resume is not None).wanted)


def _layout_of(launch: Launch) -> list[str]:
    from example_trainer.launcher.placement.choice import roles_of

    settings = launch.settings
    lines = [f"{settings.placement.describe()}: {role.describe()}" for role in roles_of(settings)]
    if settings.layout is not None:
        lines += [f"{settings.layout.describe()}\nworkers: {', '.join(settings.layout.worker_names)}"]
    return lines


if __name__ == "__main__":
    main()
