"""The examination of a run file: every check over what it asks, with all findings at once.

`atropos doctor RUN.yaml` takes the launcher's flags as well. A file that cannot be read and a misspelt key of the
trainer are refused in one line, as the launcher refuses them; all else is a finding with the offending value and what
to do about it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atropos_api.common.cliconfig import ConfigError
from example_trainer.commands.doctor import model_checks, resource_checks, sampling_checks, tokenizer_checks
from example_trainer.commands.doctor.findings import Finding, as_lines, counted, error, exit_code, warning
from example_trainer.commands.doctor.requested_run import RequestedRun, gather
from example_trainer.launcher.run_file import without_effect
from example_trainer.launcher.run_file_sections import refuse_broker_settings

Check = Callable[[RequestedRun], Iterator[Finding]]


def check_settings(requested: RequestedRun) -> Iterator[Finding]:
    """Report settings that were changed and have no effect; the other checks need a server's context length."""
    for text in without_effect(requested.settings, "max_model_len"):
        yield warning("settings", text, "leave it out, or use the mode or setting that it is for")


def check_broker(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the broker takes its options, if the launch starts it."""
    settings = requested.settings
    try:
        if "atropos_url" not in requested.config.model_fields_set:
            refuse_broker_settings(settings.sections["api"], settings.flags["api"])
    except ConfigError as refused:
        yield error("broker", str(refused), "correct it, or leave it out; run-api --help lists its options")


CHECKS: Sequence[Check] = (
    check_settings,
    check_broker,
    model_checks.check_files,
    model_checks.check_other_models,
    model_checks.check_family,
    model_checks.check_layers,
    model_checks.check_lengths,
    model_checks.check_rope,
    model_checks.check_head,
    tokenizer_checks.check_tokenizer,
    tokenizer_checks.check_other_tokenizers,
    tokenizer_checks.check_teachers_vocabulary,
    tokenizer_checks.check_chat_template,
    tokenizer_checks.check_end_of_turn,
    sampling_checks.check_environments,
    sampling_checks.check_batch,
    sampling_checks.check_sampling,
    sampling_checks.check_logprobs,
    sampling_checks.check_teacher,
    sampling_checks.check_defaults,
    sampling_checks.check_server_keys,
    model_checks.check_server_start,
    resource_checks.check_ports,
    resource_checks.check_gpus,
    resource_checks.check_memory,
    resource_checks.check_disk,
    resource_checks.check_shared_memory,
    resource_checks.check_packages,
)
"""Every check of a run, in the order in which findings are reported."""


def examine_run(argv: Sequence[str]) -> list[Finding]:
    """Return all findings about the run that `argv` describes; raise `ConfigError` if it cannot be read."""
    requested, findings = gather(argv)
    for check in CHECKS:
        findings += check(requested)
    return list(dict.fromkeys(findings))


def run(argv: Sequence[str]) -> int:
    """Examine a run file, print the findings, and return the exit code."""
    first, *flags = argv
    if not first.startswith("-"):
        argv = ["--config", first, *flags]
    if stray := next((word for word in flags[:1] if not word.startswith("-") and not first.startswith("-")), None):
        raise ConfigError(f"atropos doctor takes one run file, got {first} and {stray}; --config adds another")
    began = time.monotonic()
    findings = examine_run(argv)
    sys.stdout.writelines(f"{line}\n" for line in as_lines(findings))
    name = Path(first).name if not first.startswith("-") else "the run"
    seconds = time.monotonic() - began
    sys.stdout.write(f"{name}: {counted(findings)} ({len(CHECKS)} checks, {seconds:.1f} s; nothing was started)\n")
    return exit_code(findings)
