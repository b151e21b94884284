"""The `atropos` command: it hands its arguments to a verb, whose module is imported only when the verb is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from atropos_api.common.cliconfig import ConfigError, nearest, run_cli

VERBS = {
    "doctor": "[RUN.yaml]: examine a run file before it starts, or this machine; --memory MODEL: what fits a GPU; "
    "--layers MODEL: what layer filters take",
    "dpo": "OUT: write pairs of better and worse rollouts as a data set, from --groups FILE or --api-url URL",
    "env": "VERB: work on environments and their data, see atropos env --help",
    "replay": "FILE: train one saved batch again, from the checkpoint before it",
    "report": "RUN: print the summary of a run directory, redraw its picture and its pages of rollouts; "
    "--cost-per-hour PRICE adds the cost",
    "sft": "OUT: write the best rollouts as a data set, from --groups FILE or --api-url URL",
    "top": "URL: watch a broker",
    "view": "[FILE]: a local page of the groups that come in",
}


PRICE_FLAG = "--cost-per-hour"
OWN_HELP = frozenset({"doctor", "dpo", "env", "replay", "sft", "top", "view"})


def main() -> NoReturn:
    run_cli(run)


def run(argv: list[str]) -> int:
    """Call the verb that the first argument names with the other arguments."""
    if not argv or argv[0] in {"-h", "--help"}:
        sys.stdout.write(_usage())
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        raise ConfigError(f"unknown verb {verb!r}{nearest(verb, VERBS)} (verbs: {', '.join(VERBS)})")
    if verb not in OWN_HELP and rest and rest[0] in {"-h", "--help"}:
        sys.stdout.write(f"usage: atropos {verb} {_operand(verb)}\n\n{VERBS[verb]}\n")
        return 0
    verbs = {
        "doctor": _doctor,
        "dpo": _dpo,
        "env": _env,
        "replay": _replay,
        "report": _report,
        "sft": _sft,
        "top": _top,
        "view": _view,
    }
    return verbs[verb](rest)


DOCTOR_DESCRIPTION = """With a run file (atropos doctor RUN.yaml, then flags as atropos-grpo-run takes them): examine
what it asks and this machine offers, before anything is started; exit code 1 if there is an error. Else: check this
machine, or show with the options below what fits on a GPU and what layer filters take."""


def _usage() -> str:
    lines = "".join(f"  {verb:8} {text}\n" for verb, text in VERBS.items())
    programs = "The programs themselves: run-api, atropos-grpo, atropos-grpo-run."
    return f"usage: atropos VERB [arguments]\n\n{lines}\n{programs}\n"


def _operand(verb: str) -> str:
    head, colon, _ = VERBS[verb].partition(":")
    return head if colon else ""


def _one_operand(verb: str, rest: list[str]) -> str:
    if len(rest) != 1:
        raise ConfigError(f"atropos {verb} takes one argument, {_operand(verb)}; got {len(rest)}")
    return rest[0]


def _doctor(rest: list[str]) -> int:
    if rest and (not rest[0].startswith("-") or rest[0].startswith("--config")):
        from example_trainer.commands.doctor.examination import run as examine_run

        return examine_run(rest)
    from atropos_api.common.cliconfig import load_config
    from example_trainer.commands.memory import MemoryOptions, advise

    options = load_config(MemoryOptions, rest, prog="atropos doctor", description=DOCTOR_DESCRIPTION)
    if options.memory is not None:
        sys.stdout.writelines(f"{line}\n" for line in advise(options))
        return 0
    if options.layers is not None:
        from example_trainer.commands.doctor.machine import advise_on_layers

        sys.stdout.writelines(f"{line}\n" for line in advise_on_layers(options.layers))
        return 0
    from example_trainer.commands.doctor.findings import as_lines, exit_code
    from example_trainer.commands.doctor.machine import examine

    findings = list(examine())
    sys.stdout.writelines(f"{line}\n" for line in as_lines(findings))
    return exit_code(findings)


def _report(rest: list[str]) -> int:
    from rich.console import Console

    from example_trainer.launcher.summary import as_table, draw, read_timeline, summarise, write_rollout_pages

    rest, cost_per_hour = _take_price(rest)
    run_dir = Path(_one_operand("report", rest))
    summary = summarise(run_dir, timeline=read_timeline(run_dir), cost_per_hour=cost_per_hour)
    Console().print(as_table(summary))
    sys.stdout.writelines(f"{line}\n" for line in (f"picture: {draw(run_dir)}", *write_rollout_pages(run_dir)))
    return 0


def _take_price(rest: list[str]) -> tuple[list[str], float | None]:
    """Return the arguments without `--cost-per-hour PRICE` (or `=PRICE`), and the price if there is one."""
    at = next((index for index, word in enumerate(rest) if word.partition("=")[0] == PRICE_FLAG), None)
    if at is None:
        return rest, None
    _, joined, value = rest[at].partition("=")
    end = at + 1 if joined else at + 2
    given = [value] if joined else rest[at + 1 : end]
    try:
        (price,) = map(float, given)
    except ValueError:
        raise ConfigError(f"{PRICE_FLAG} {' '.join(given)} is no price; give a number, {PRICE_FLAG} 2.5") from None
    return rest[:at] + rest[end:], price


def _replay(rest: list[str]) -> int:
    from example_trainer.commands.replay import run as replay

    return replay(rest)


def _env(rest: list[str]) -> int:
    from environments.commands import run as work_on_environments

    return work_on_environments(rest)


def _dpo(rest: list[str]) -> int:
    from environments.export import run_dpo

    return run_dpo(rest)


def _sft(rest: list[str]) -> int:
    from environments.export import run_sft

    return run_sft(rest)


def _view(rest: list[str]) -> int:
    from environments.export import run as show

    return show(rest)


def _top(rest: list[str]) -> int:
    from example_trainer.commands.top import run as watch

    return watch(rest)


if __name__ == "__main__":
    main()
