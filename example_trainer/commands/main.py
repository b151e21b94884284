"""The `atropos` command: it hands its arguments to a verb, whose module is imported only when the verb is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from atropos_api.common.cliconfig import ConfigError, nearest, run_cli


class Verb(NamedTuple):
    """A verb's line in the help, which begins with its operand, and the function that gets the verb's arguments."""

    text: str
    function: str
    """`module:function`; the function returns the exit code."""
    prints_help: bool = True
    """True if the function itself answers `--help`."""


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "doctor": Verb(
            "[RUN.yaml]: examine a run file before it starts, or this machine; --memory MODEL: what fits a GPU; "
            "--layers MODEL: what layer filters take",
            "example_trainer.commands.doctor.command:run",
        ),
        "dpo": Verb(
            "OUT: write pairs of better and worse rollouts as a data set, from --groups FILE or --api-url URL",
            "environments.export:run_dpo",
        ),
        "drain": Verb(
            "SERVER: let inference servers, named by id, address or host, end their requests and leave; --broker URL",
            "example_trainer.commands.scaling:run_drain",
        ),
        "env": Verb("VERB: work on environments and their data, see atropos env --help", "environments.commands:run"),
        "render": Verb(
            "slurm|kuberay RUN.yaml: print an sbatch script, or manifests for KubeRay, that run a run file on Ray",
            "example_trainer.commands.render:run",
        ),
        "replay": Verb(
            "FILE: train one saved batch again, from the checkpoint before it", "example_trainer.commands.replay:run"
        ),
        "report": Verb(
            "RUN...: print the summary of a run directory and write its picture, report.html and pages of rollouts; "
            "of several, compare them in one table and one page; --html FILE names the page, "
            "--cost-per-hour PRICE adds the cost",
            "example_trainer.commands.report:run",
            prints_help=False,
        ),
        "scale": Verb(
            "vllm=N: have the launcher of a run start or drain inference servers until there are N; --broker URL",
            "example_trainer.commands.scaling:run_scale",
        ),
        "sft": Verb(
            "OUT: write the best rollouts as a data set, from --groups FILE or --api-url URL",
            "environments.export:run_sft",
        ),
        "top": Verb("URL: watch a broker", "example_trainer.commands.top:run"),
        "view": Verb(
            "[RUN|FILE]: the live page of a run that has ended, from its directory; of a file, its newest groups",
            "example_trainer.commands.view:run",
        ),
    }
)


def main() -> NoReturn:
    run_cli(run)


def run(argv: list[str]) -> int:
    """Call the verb that the first argument names with the other arguments."""
    if not argv or argv[0] in {"-h", "--help"}:
        sys.stdout.write(_usage())
        return 0
    name, *rest = argv
    if name not in VERBS:
        raise ConfigError(f"unknown verb {name!r}{nearest(name, VERBS)} (verbs: {', '.join(VERBS)})")
    verb = VERBS[name]
    if not verb.prints_help and rest and rest[0] in {"-h", "--help"}:
        sys.stdout.write(f"usage: atropos {name} {verb.text.partition(':')[0]}\n\n{verb.text}\n")
        return 0
    module, _, function = verb.function.partition(":")
    code: int = getattr(import_module(module), function)(rest)
    return code


def _usage() -> str:
    lines = "".join(f"  {name:8} {verb.text}\n" for name, verb in VERBS.items())
    programs = "The programs themselves: run-api, atropos-grpo, atropos-grpo-run, atropos-sft."
    return f"usage: atropos VERB [arguments]\n\n{lines}\n{programs}\n"


if __name__ == "__main__":
    main()
