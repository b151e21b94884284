"""The command line of `atropos doctor`: a run file, this machine, or what fits on a GPU is examined.

It is separate from the examinations, each of which is imported only if it is asked for.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.option_flags import named_in
from atropos_api.common.secrets import redact_arguments
from example_trainer.commands.memory import MemoryOptions, advise

DESCRIPTION = """With a run file (atropos doctor RUN.yaml, then flags as atropos-grpo-run takes them): examine
what it asks and this machine offers, before anything is started; exit code 1 if there is an error. Else: check this
machine, or show with the options below what fits on a GPU and what layer filters take."""


def run(arguments: Sequence[str]) -> int:
    """Examine what the arguments name, and return the exit code."""
    if arguments and (not arguments[0].startswith("-") or arguments[0].startswith("--config")):
        from example_trainer.commands.doctor.examination import run as examine_run

        return examine_run(arguments)
    _refuse_flags_of_a_run(arguments)
    options = load_config(MemoryOptions, arguments, prog="atropos doctor", description=DESCRIPTION)
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


def _refuse_flags_of_a_run(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for the first flag that is not the doctor's own, if a run has it."""
    for argument in arguments:
        if argument.startswith("--") and not named_in([argument], MemoryOptions) and _is_of_a_run(argument):
            raise ConfigError(
                f"{argument.partition('=')[0]} is a flag of a run, and these follow a run file: "
                f"atropos doctor demo {shlex.join(redact_arguments(arguments))}"
            )


def _is_of_a_run(argument: str) -> bool:
    from example_trainer.launcher.run_file import RunConfig
    from example_trainer.launcher.section_flags import FLAG_SECTIONS

    section, dot, _ = argument[2:].partition(".")
    return argument == "--env" or bool(dot and section in FLAG_SECTIONS) or bool(named_in([argument], RunConfig))
