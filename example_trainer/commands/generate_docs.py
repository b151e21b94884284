"""The module prints a reference page from the code: `python -m example_trainer.commands.generate_docs cli`.

The other pages are metrics, prometheus and memory. It prints the whole page; a test compares it with the one in
docs/reference. The text on each option and each metric comes from its own declaration.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from atropos_api.common import metric_names
from atropos_api.common.cliconfig import ConfigError, nearest, run_cli
from atropos_api.common.option_flags import cell, list_options, option_table
from atropos_api.common.prometheus import table
from example_trainer.cli import TrainerCommand
from example_trainer.commands.memory import memory_page
from example_trainer.commands.scaling import DrainOptions, ScaleOptions
from example_trainer.config import TrainingConfig
from example_trainer.launcher.run_file import LAUNCHER_FIELDS, RunConfig
from example_trainer.monitoring import prometheus
from example_trainer.monitoring.health import limit_table, sign_table
from example_trainer.options.presets import ENVIRONMENT_OPTIONS, PRESETS, Preset
from example_trainer.serving import metrics as serving_metrics
from example_trainer.serving.config import ServerConfig
from example_trainer.sft.cli import SftCommand

CLI_INTRODUCTION = """\
# Command lines

`python -m example_trainer.commands.generate_docs cli` prints this page; the options' own declarations are its source.

An option is given as a flag (`--clip-eps 0.2`, `--clip_eps 0.2` and `--clip-eps=0.2` are the same), or as a key of a
YAML file (`--config FILE`, repeatable, later files override earlier ones) in its `trainer:` section or at top level.
Flags override files, files override a preset, and a preset overrides the defaults below. A switch takes no value,
`true` or `false`; `--no-...` turns it off. `None` clears an option that may be unset. A mistake ends the program with
exit code 2 and one line on standard error that names the value, and for a misspelt flag or key the nearest valid one.

"""

LAUNCHER_INTRODUCTION = """\
All of the trainer's options (`--weight-bridge-mode` is `shared_vllm` here unless said otherwise), those of the other
programs under their section's name (`--api.port 8002`, `--vllm.max_num_seqs 64`, `--env.group_size 8`,
`--openai.server_type vllm`), and the options below. `--config` takes a file, or the name of a run file that comes with
the package: `demo`, `gsm8k`, `math_zero_shared` or `math_zero_lora`. In a checkout `configs/` is their folder,
`example_trainer/configs/`.
"""

RUN_FILE = """\
### The run file

A YAML file for all programs, such as `configs/demo.yaml`. Each program reads its own section, so `run-api --config`,
`atropos-grpo --config` and `python ENV.py serve --config` take the same file. A section that is not there holds
nothing: without `env` (or `--env`) and `environments` no environment is started.

| section | holds |
|---|---|
| `trainer` | the trainer's options; the launcher's own, in the table above, are flags only |
| `modes` | options of `trainer` that differ in a weight sync mode: `modes: {lora_only: {lr: 1.0e-5}}` |
| `modes_on_gpu` | the same, over `modes`, where vLLM serves from a GPU |
| `api` | options of `run-api` ([the broker](broker.md#flags-of-run-api)) |
| `vllm` | options of the inference server, below, and all others of vLLM |
| `env`, `openai` | settings of the environment, and of the servers that it asks \
([all of them](environments.md#flags-of-every-environment)); `env.server` is its file |
| `teacher` | the server of [a teacher](../howto/distillation.md) |
| `environments` | [several of them](../howto/your-own-environment.md#several-in-one-run), each with `env`, `openai` |
| `placement` | [sizes over nodes](../howto/servers-that-come-and-go.md#plan-the-sizes-of-a-run-over-nodes), and \
[a Ray cluster](../howto/ray.md#what-each-program-gets) |
"""

SERVER_VERBS = """\
## `atropos scale` and `atropos drain`: inference servers of a run that goes on

[Servers that come and go](../howto/servers-that-come-and-go.md#change-their-number-while-a-run-goes-on) says
what they do. They end with exit code 2 and one line if no launcher takes the request, or if the server has not left in
time.
"""

EXIT_CODES = """\
## Exit codes

These are the codes of `atropos-grpo`; `atropos-grpo-run` returns its 2 and 3, and exits with 1 if a program crashed.

| code | meaning |
|---|---|
| 0 | the last step was reached |
| 2 | it cannot start or continue; one line says why and what to change |
| 3 | a sign of trouble ended the run (`--stop-on`); a checkpoint was written |
| 75 | it lost its broker (unreachable, or answering 5xx) or its inference server (away for `--wait-timeout`), or \
found none when it was to go on; `--resume auto` goes on from the newest checkpoint, and `atropos-grpo-run` does so by \
itself as long as it may restart the trainer |
| 128 + n | signal n ended it; after SIGTERM, SIGINT or SIGHUP a checkpoint was written for `--resume auto` |
"""

METRICS_INTRODUCTION = """\
# Metrics and events

`python -m example_trainer.commands.generate_docs metrics` prints this page; the names' own declarations are its source.

A step is a line of `metrics.jsonl` in the run directory, with `step`, `timestamp` (Unix time) and those metrics
below that the step has; W&B, Trackio and TensorBoard get the same names, Prometheus [its own spelling](prometheus.md).
Values that are not finite are left out. A resumed run drops the lines of steps that it trains again. Two runs of the
same seed over the same batches have the same values except for `time/*`, `perf/*`, `policy_version` and timestamps.
"""

PROMETHEUS_INTRODUCTION = """\
# Metrics for Prometheus

`python -m example_trainer.commands.generate_docs prometheus` prints this page; the metrics' own declarations are its
source. [Observe a run](../howto/observe.md) says how to collect them. Names have base units, and counters end in
`_total`.

| program | port | names at `/metrics` |
|---|---|---|
| broker | its own | `atropos_...`: [here](broker.md#metrics) |
| vLLM server | its own | `atropos_server_...`: below; `vllm:...`: vLLM's own |
| trainer | `--metrics-port` | `atropos_trainer_...`: below |
| environment | `--env.metrics-port` | `atropos_environment_...`: [here](environments.md#metrics-of-serve) |

Each also has `atropos_build_info` and the metrics of [its process](broker.md#metrics).

## The trainer

"""

TRAINER_FAMILIES = """\

The others are the [metrics of the last step](metrics.md), as gauges. `_` stands for `/`, times end in `_seconds`,
memory in `_bytes`; the part of a name in braces is a label: `data/overlong` is
`atropos_trainer_data_cause{cause="overlong"}`.

"""

SERVER_HEADING = "\n## The inference server\n\n"

EVENTS_INTRODUCTION = """\
## Signs of trouble

A sign that appears is a line of `events.jsonl` with `event` (`health`), `sign`, `step`, `value`, `message`, `advice`
and `timestamp`, and a warning in the log. A sign is reported when it appears, and again only after it has disappeared.
`--stop-on health` ends the run at any of them, `--stop-on kl loss` at those named.

| sign | message | advice |
|---|---|---|
"""

LIMITS_INTRODUCTION = """\
`--health-limits` overrides these limits by name: `--health-limits mean_ratio=0.7-1.3 reward_drop=inf`.
`reward_drop` counts in standard deviations of a batch's rewards, `rate_drop` is a share of the median rate of up to 100
steps before; both look at the last `window_steps` steps. `no_signal` is a share of sequences that each of the last
`flat_steps` steps exceeds. Checkpoints contain the state of the signs, so a resumed run is judged like an uninterrupted
one.

| limit | usual |
|---|---|
"""


def main() -> None:
    run_cli(run)


def run(argv: Sequence[str]) -> int:
    """Print the page that is asked for."""
    if len(argv) != 1 or argv[0] not in PAGES:
        asked = argv[0] if argv else ""
        raise ConfigError(f"unknown page {asked!r}{nearest(asked, PAGES)}; name one of {', '.join(PAGES)}")
    sys.stdout.write(PAGES[argv[0]]())
    return 0


def cli_page() -> str:
    """Return the text of docs/reference/cli.md."""
    launcher = [option for option in list_options(RunConfig) if option.path in LAUNCHER_FIELDS]
    blocks = [
        CLI_INTRODUCTION.rstrip() + "\n",
        "## `atropos-grpo`: the trainer\n",
        *_sections(),
        "### Options of the command line only\n",
        option_table(option for option in list_options(TrainerCommand) if option.path == "dry_run"),
        _preset_block(),
        _environment_block(),
        "## `atropos-grpo-run`: broker, vLLM, environment and trainer at once\n",
        LAUNCHER_INTRODUCTION,
        option_table(launcher),
        RUN_FILE,
        "## `atropos-sft`: supervised fine-tuning\n",
        "[SFT, then GRPO](../howto/sft.md) is the guide. Its exit codes are 0, 2 and 128 + n below.\n",
        option_table(list_options(SftCommand)),
        "## `python -m example_trainer.vllm_api_server`: the inference server\n",
        "Every other option of vLLM is accepted too.\n",
        option_table(list_options(ServerConfig)),
        SERVER_VERBS,
        "### `atropos scale vllm=N`\n",
        option_table(list_options(ScaleOptions)),
        "### `atropos drain SERVER`\n",
        option_table(list_options(DrainOptions)),
        EXIT_CODES,
    ]
    return "\n".join(blocks)


def metrics_page() -> str:
    """Return the text of docs/reference/metrics.md."""
    blocks = [METRICS_INTRODUCTION]
    for heading, metrics in metric_sections().items():
        rows = "".join(f"| `{name}` | {cell(text)} |\n" for name, text in metrics)
        blocks.append(f"## {heading}\n\n| metric | meaning |\n|---|---|\n{rows}")
    signs = "".join(f"| `{name}` | {cell(_plain(text))} | {cell(advice)} |\n" for name, text, advice in sign_table())
    limits = "".join(f"| `{name}` | {usual} |\n" for name, usual in limit_table())
    blocks += [EVENTS_INTRODUCTION + signs, LIMITS_INTRODUCTION + limits]
    return "\n".join(blocks)


def prometheus_page() -> str:
    """Return the text of docs/reference/prometheus.md."""
    families = (prometheus.spell(name).metric for name in prometheus.templates())
    return (
        PROMETHEUS_INTRODUCTION
        + table(prometheus.COUNTERS, prometheus.PREFIX)
        + TRAINER_FAMILIES
        + table(families, prometheus.PREFIX)
        + SERVER_HEADING
        + table(serving_metrics.METRICS, serving_metrics.PREFIX)
    )


def metric_sections() -> dict[str, list[tuple[str, str]]]:
    """Return name and meaning of every metric, under the heading that `metric_names` gives."""
    path = Path(metric_names.__file__)
    source = path.read_text(encoding="utf-8")
    headings = {number: line[2:] for number, line in enumerate(source.splitlines(), 1) if line.startswith("# ")}
    sections: dict[str, list[tuple[str, str]]] = {}
    body = ast.parse(source).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Constant):
            above = max(number for number in headings if number < statement.lineno)
            sections.setdefault(headings[above], []).append((str(statement.value.value), _docstring(after)))
    return sections


PAGES: Mapping[str, Callable[[], str]] = {
    "cli": cli_page,
    "metrics": metrics_page,
    "prometheus": prometheus_page,
    "memory": memory_page,
}


def _docstring(statement: ast.stmt | None) -> str:
    found = statement.value if isinstance(statement, ast.Expr) else None
    return str(found.value) if isinstance(found, ast.Constant) else ""


def _sections() -> Iterator[str]:
    """Yield the trainer's options, a heading and a table for each class that declares some."""
    options = {option.path: option for option in list_options(TrainingConfig)}
    for section in reversed(TrainingConfig.__mro__[1:]):
        if issubclass(section, BaseModel) and section is not BaseModel and "__annotations__" in vars(section):
            text = " ".join((section.__doc__ or "").split())
            yield f"### {text.partition(';')[0].rstrip('.')}\n"
            yield option_table(options[name] for name in section.__annotations__ if name in options)


def _preset_block() -> str:
    rows = "".join(
        f"| `{name}` | {cell(preset.about)} | {_preset_settings(preset)} |\n" for name, preset in PRESETS.items()
    )
    return f"### Presets\n\n| `--preset` | what it is | what it sets |\n|---|---|---|\n{rows}"


def _preset_settings(preset: Preset) -> str:
    parts = [_assignments(preset.settings)]
    if preset.with_adapters:
        parts.append(f"with adapters {_assignments(preset.with_adapters)}")
    if preset.environment:
        parts.append(f"environment {_assignments(preset.environment)}")
    return "; ".join(parts)


def _assignments(settings: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in settings.items())


def _environment_block() -> str:
    rows = "".join(f"| `--{name.replace('_', '-')}` | `--{owner}` |\n" for name, owner in ENVIRONMENT_OPTIONS.items())
    return (
        "### Options of the environment, by short names\n\n"
        "The launcher passes these on to the environment; the trainer refuses them and names their owner.\n\n"
        f"| option | the environment's |\n|---|---|\n{rows}"
    )


def _plain(template: str) -> str:
    """Return a health sign's message with `{metrics[name]:format}` shortened to `{name:format}`, for the page."""
    return template.replace("{metrics[", "{").replace("]:", ":")


if __name__ == "__main__":
    main()
