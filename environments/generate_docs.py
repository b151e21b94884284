"""The module prints the reference pages that come from the code: `python -m environments.generate_docs
environments` (or `sdk`).

A test compares each page in docs/reference with the page that this module would print now.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from pydantic import BaseModel

from atropos_api.common.cliconfig import ConfigError, nearest, run_cli
from atropos_api.common.option_flags import Option, cell, list_options, option_table
from atropos_api.common.prometheus import table as metric_table
from environments.sdk import BaseEnv, ManagedSession, SequenceNode, scored_group, scored_item
from environments.sdk.config import APIServerConfig, BaseEnvConfig, ServerBaseline, as_server_list
from environments.sdk.environment import Environment
from environments.sdk.groups import ScoredDataGroup
from environments.sdk.rehearsal import Rehearsal
from environments.sdk.runtime.cli import VERBS, EnvironmentCommand
from environments.sdk.runtime.metrics import METRICS, PREFIX
from environments.sdk.server_manager import ServerManager
from environments.sdk.teacher import TeacherMixin
from environments.tasks.data import FORMS, DataFields
from environments.tasks.question_env import QuestionEnvConfig

SHIPPED: Final = (
    "arithmetic_server",
    "dataset_server",
    "gsm8k_server",
    "math_server_zero",
    "tool_server",
    "judge_server",
    "distill_server",
    "reasoning_gym_server",
    "verifiers_server",
)

ENVIRONMENTS_INTRODUCTION: Final = """\
# Environments and their settings

`python -m environments.generate_docs environments` prints this page; the settings' own declarations are its source.

These come with the package. `python environments/NAME.py VERB [flags]` runs one, `atropos-grpo-run --config RUN.yaml
--env NAME.py` trains on it. [Your own](../howto/your-own-environment.md) is a class; environments of the `verifiers`
library, of reasoning-gym and [those written for Atropos](atropos-environments.md) run as they are.
"""

PROCESS: Final = """\
`process` writes `data/NAME.jsonl`, or the file that `--env.data-path-to-save-groups` names. Unless told otherwise it
keeps groups whose scores are all equal (`--env.ensure-scores-are-not-same false`), and the messages
(`--env.include-messages true`).
"""

FLAGS_INTRODUCTION: Final = """\
## Flags of every environment

A flag is also a key of a YAML file (`--config FILE`) in its section `env:` or `openai:`; flags win over files, files
over what the environment itself sets. Several inference servers are a list under `openai:`. A switch takes `true`,
`false` or no value, a list several words; `None` unsets a setting whose default it is.
"""

TEACHER_INTRODUCTION: Final = """\
### The teacher's server

These are for an environment with a teacher, such as `distill_server.py`. A YAML file has the section `teacher:`, a list
if there are several servers.
"""

QUESTIONS_INTRODUCTION: Final = """\
### Of environments with questions

All environments below except `reasoning_gym_server.py` and `verifiers_server.py` have these. `arithmetic_server.py`
makes its own questions if none are named; it evaluates greedily, so it has no `--env.eval-temperature`.
"""

METRICS_INTRODUCTION: Final = """\
### Metrics of `serve`

`--env.metrics-port N` serves these [for Prometheus](../howto/observe.md) at `http://127.0.0.1:N/metrics`.
"""

SDK_INTRODUCTION: Final = """\
# The environment SDK

`python -m environments.generate_docs sdk` prints this page; the code's own signatures and docstrings are its source. A
whole environment is in [your own environment](../howto/your-own-environment.md). `from environments.sdk import` gives
`BaseEnv`, `BaseEnvConfig`, `APIServerConfig`, `scored_group`, `scored_item`, `GoldItem`, `ItemDropped`; inside an
environment, `self.server` and a session are the two other objects that it uses.
"""

OVERRIDES_FROM: Final = "# Methods that an environment overrides."
USES_FROM: Final = "# Methods that an environment calls."


def main() -> None:
    run_cli(run)


def run(argv: Sequence[str]) -> int:
    """Print the page that the one argument names."""
    if len(argv) != 1 or argv[0] not in PAGES:
        asked = argv[0] if argv else ""
        raise ConfigError(f"name one page: {', '.join(PAGES)}{nearest(asked, PAGES)}")
    sys.stdout.write(PAGES[argv[0]]())
    return 0


def environments_page() -> str:
    """Return the text of docs/reference/environments.md."""
    modules = {name: import_module(f"environments.{name}") for name in SHIPPED}
    rows = "".join(
        f"| [`{name}.py`](#{name}py) | {cell(_first_line(_environment_of(module)))} |\n"
        for name, module in modules.items()
    )
    verbs = "".join(f"| `{verb}` | {meaning} |\n" for verb, meaning in VERBS.items())
    blocks = [
        ENVIRONMENTS_INTRODUCTION,
        f"| environment | what it asks |\n|---|---|\n{rows}",
        f"| verb | what it does |\n|---|---|\n{verbs}",
        PROCESS,
        FLAGS_INTRODUCTION,
        _table(list_options(BaseEnvConfig, "env.")),
        "### The inference server\n",
        _table(list_options(APIServerConfig, "openai.")),
        TEACHER_INTRODUCTION,
        _table(_teacher_options()),
        QUESTIONS_INTRODUCTION,
        _table(_additional_options(QuestionEnvConfig, BaseEnvConfig)),
        _forms_of_records(),
        "### Of the command itself\n",
        _table(option for option in list_options(EnvironmentCommand) if not option.group),
        METRICS_INTRODUCTION,
        metric_table(METRICS, PREFIX),
        *(_shipped(name, module) for name, module in modules.items()),
    ]
    return "\n".join(blocks)


def sdk_page() -> str:
    """Return the text of docs/reference/environment-sdk.md."""
    overrides, uses = _parts_of_base_env()
    fields = "".join(
        f"| `{name}` | `{_plain(annotation)}` |\n" for name, annotation in ScoredDataGroup.__annotations__.items()
    )
    blocks = [
        SDK_INTRODUCTION,
        "## `BaseEnv`: what an environment overrides\n",
        *(_callable(name, getattr(BaseEnv, name), required=name in BaseEnv.__abstractmethods__) for name in overrides),
        "## `BaseEnv`: what an environment uses\n",
        *(_callable(name, inspect.getattr_static(BaseEnv, name)) for name in uses),
        "## Groups\n",
        *(_callable(function.__name__, function) for function in (scored_group, scored_item)),
        f"A group may also be put together by hand, of these keys:\n\n| key | value |\n|---|---|\n{fields}",
        "## `self.server`: the inference servers\n",
        *_members(ServerManager),
        "## A session: what `self.server.managed_server()` yields\n",
        *_members(ManagedSession),
        "## A sequence: what `session.nodes` holds\n",
        _fields(SequenceNode),
        "## For tests: `environments.sdk.rehearsal`\n",
        f"{_doc(Rehearsal)}\n",
        *_members(Rehearsal),
    ]
    return "\n".join(block.rstrip() + "\n" for block in blocks)


PAGES: Mapping[str, Callable[[], str]] = {"environments": environments_page, "sdk": sdk_page}


def _environment_of(module: ModuleType) -> type[BaseEnv]:
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, BaseEnv)]
    (environment,) = [value for value in own if value.__module__ == module.__name__]
    return environment


def _shipped(name: str, module: ModuleType) -> str:
    """Return the section of one environment: its module's docstring, its own settings, and the defaults that it
    changes.
    """
    config, servers = _environment_of(module).config_init()
    general = QuestionEnvConfig if isinstance(config, DataFields) else BaseEnvConfig
    own = _additional_options(type(config), general)
    usual = {**type(config)().model_dump(mode="json"), **general().model_dump(mode="json")}
    defaults = config.model_dump(mode="json")
    changed = {field: value for field, value in defaults.items() if value != usual[field]}
    parts = [f"## `{name}.py`\n", textwrap.dedent(module.__doc__ or "").strip() + "\n"]
    if own:
        parts.append(_table(own))
    changed |= {f"openai.{field}": value for field, value in _changes(servers).items()}
    if changed:
        parts.append("Other defaults: " + ", ".join(f"`{field}` {value}" for field, value in changed.items()) + ".\n")
    return "\n".join(parts)


def _changes(servers: ServerBaseline | APIServerConfig | list[APIServerConfig]) -> dict[str, Any]:
    """Return the settings of an environment's inference server that differ from every server's defaults."""
    usual = APIServerConfig().model_dump(mode="json")
    (server,) = as_server_list(servers)
    return {field: value for field, value in server.model_dump(mode="json").items() if value != usual[field]}


def _teacher_options() -> list[Option]:
    """Return the flags of a teacher's server, with the defaults that an environment with a teacher gives them."""
    (teacher,) = as_server_list(TeacherMixin.teacher_config_init())
    given = {f"teacher.{field}": value for field, value in _changes(teacher).items()}
    options = list_options(type(teacher), "teacher.")
    return [replace(option, default=given.get(option.path, option.default)) for option in options]


def _forms_of_records() -> str:
    """Return the sentence on the columns that a record of questions may have."""
    pairs = ", ".join(f"`{question}`/`{answer}`" for question, answer in FORMS)
    return f"A record has one of these pairs of columns, looked for in this order: {pairs}.\n"


def _table(options: Iterable[Option]) -> str:
    return option_table(options, with_types=True)


def _additional_options(model: type[BaseModel], general: type[BaseModel]) -> list[Option]:
    """Return the flags that a configuration adds to those of a more general one."""
    known = {option.path for option in list_options(general, "env.")}
    return [option for option in list_options(model, "env.") if option.path not in known]


def _parts_of_base_env() -> tuple[list[str], list[str]]:
    """Return the names of the methods to override and of those to use, as divided by comments in the class's source."""
    lines, _ = inspect.getsourcelines(Environment)
    marks = [next(at for at, line in enumerate(lines) if mark in line) for mark in (OVERRIDES_FROM, USES_FROM)]
    (body,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(body, ast.ClassDef)
    named = [
        (statement.name, statement.lineno)
        for statement in body.body
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not statement.name.startswith("_")
    ]
    used = [name for name, at in named if at > marks[1]]
    return [name for name, at in named if marks[0] < at <= marks[1]], [*used, "cli"]


def _members(cls: type) -> Iterator[str]:
    for name, member in vars(cls).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod)):
            yield _callable(name, member)


def _callable(name: str, member: Any, *, required: bool = False) -> str:
    """Describe a function, method or property: its call and the first paragraph of its docstring."""
    function: Any = member.fget if isinstance(member, property) else getattr(member, "func", member)
    function = inspect.unwrap(getattr(function, "__func__", function))
    is_attribute = isinstance(member, property) or hasattr(member, "func")
    awaited = "await " if inspect.iscoroutinefunction(function) else ""
    shown = f".{name}" if is_attribute else f"{awaited}{name}{_signature(function)}"
    text = _doc(function)
    return f"`{shown}`{' (required)' if required else ''}{': ' if text else ''}{text}\n"


def _signature(function: Any) -> str:
    parts: list[str] = []
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name not in {"self", "cls"}]
    for parameter in parameters:
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else stars
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def _fields(cls: type) -> str:
    """Return the table of a class's public fields, each with the docstring below it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    rows = []
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found = after.value if isinstance(after, ast.Expr) else None
            text = str(found.value) if isinstance(found, ast.Constant) else ""
            if not statement.target.id.startswith("_"):
                rows.append(f"| `{statement.target.id}` | {cell(text)} |\n")
    return f"{_doc(cls)}\n\n| field | meaning |\n|---|---|\n{''.join(rows)}"


def _doc(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").splitlines()[0]


def _plain(annotation: Any) -> str:
    text = getattr(annotation, "__forward_arg__", str(annotation))
    return str(text).replace("|", "\\|")


if __name__ == "__main__":
    main()
