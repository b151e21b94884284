"""Command lines made from configuration models: defaults, then YAML files, then flags, validated once by pydantic.

The models are the only description of an option. Flags follow from them (`--clip-eps`, `--clip_eps`,
`--env.group_size`), their help from the field descriptions. Every mistake is one line that names the value and,
for a misspelt name, the nearest right one.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from atropos_api.common.errors import OUTAGE, REFUSED, AtroposError, Outage
from atropos_api.common.identity import version_line
from atropos_api.common.option_flags import Option, list_options, nested_model, takes_null
from atropos_api.common.secrets import names_secret, redact, redact_arguments, redact_text
from atropos_api.common.streams import lost_output, prepare_streams
from atropos_api.common.yaml_files import read_yaml

ModelT = TypeVar("ModelT", bound=BaseModel)
VERSION_FLAG = "--version"
Adapt = Callable[[dict[str, Any], str], dict[str, Any]]
"""A function from a YAML file's content and path to the content that is read."""

RUN_FILE_SECTIONS = (
    "trainer",
    "api",
    "vllm",
    "env",
    "openai",
    "teacher",
    "environments",
    "modes",
    "modes_on_gpu",
    "placement",
)
"""All sections of a run file; each program reads its own and passes over the others."""


class ConfigError(AtroposError):
    """A flag, a file or a value cannot be used."""


def load_config(
    model: type[ModelT],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    section: str | None = None,
    defaults: Mapping[str, object] | None = None,
    adapt: Adapt | None = None,
) -> ModelT:
    """Read `argv` into `model`; raise `ConfigError` for anything it cannot take.

    `section` names the part of a run file that belongs to this model; a file without sections is read whole. Files and
    flags override `defaults` (an environment's `config_init`). `adapt` may change a file's content before its keys are
    checked.
    """
    values, rest = _collect(
        model, argv, prog=prog, description=description, section=section, defaults=defaults or {}, adapt=adapt
    )
    if rest:
        # This comes before validation: a misspelt flag often causes a "missing" error, and its name helps more.
        _refuse_unknown(rest[0], model)
    return validate(model, values)


def load_config_with_rest(
    model: type[ModelT],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    section: str | None = None,
    defaults: Mapping[str, object] | None = None,
) -> tuple[ModelT, list[str]]:
    """Read as `load_config` does, and also return the arguments that are not the model's, for another parser."""
    values, rest = _collect(model, argv, prog=prog, description=description, section=section, defaults=defaults or {})
    try:
        return validate(model, values), rest
    except ConfigError:
        # Another parser may know these arguments, so they are refused only if they explain what is missing here.
        for argument in rest:
            if argument.startswith("--") and nearest(argument.split("=", 1)[0], _known_flags(list_options(model))):
                _refuse_unknown(argument, model)
        raise


def refuse_unknown_option(model: type[BaseModel], arguments: Iterable[str]) -> None:
    """Raise `ConfigError` for the first of these arguments, none of which is the model's, that looks like an option."""
    for argument in arguments:
        if argument.startswith("-"):
            _refuse_unknown(argument, model)


def read_config_file(
    model: type[BaseModel], path: str, *, section: str | None = None, adapt: Adapt | None = None
) -> dict[str, Any]:
    """Return the part of a YAML file that belongs to `model`, its keys checked and in snake case."""
    try:
        content = read_yaml(Path(path)) or {}
    except FileNotFoundError:
        in_configs = Path("configs") / Path(path).name
        proposal = f"; did you mean {in_configs}?" if in_configs.is_file() else ""
        raise ConfigError(f"--config {path}: no such file{proposal}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping at the top, found {type(content).__name__}")
    own = _select_section(model, content if adapt is None else adapt(content, path), section)
    if not isinstance(own, dict):
        raise ConfigError(
            f"--config {path}: section {section!r} takes settings, got {json.dumps(redact(own), default=str)}"
        )
    return check_keys(model, own, where=f"--config {path}")


def validate(model: type[ModelT], values: Mapping[str, Any]) -> ModelT:
    """Build the model; an error names all problems in one line, each with its option and the value found there."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        reported = [problem for problem in problems if not _is_other_form(problem["loc"], problems)]
        secret = frozenset(option.path for option in list_options(model) if option.secret)
        raise ConfigError("; ".join(_describe(problem, secret) for problem in reported)) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean X?` if a known name is close to `name`, else an empty text."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {matches[0]}?" if matches else ""


def run_cli(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command with the process's arguments; an `AtroposError`, or a path that cannot be used, becomes one line on
    stderr and exit code 2, an `Outage` 75.

    `--version` is answered here, so that every command and subcommand has it.
    """
    prepare_streams()
    arguments = sys.argv[1:]
    conceal_arguments()
    try:
        code = _print_version() if VERSION_FLAG in arguments else main(arguments)
        sys.stdout.flush()
    except AtroposError as error:
        sys.stderr.write(f"{program_name()}: error: {redact_text(str(error))}\n")
        code = OUTAGE if isinstance(error, Outage) else REFUSED
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        code, line = _end_with(error)
        if line:
            sys.stderr.write(f"{program_name()}: error: {line}\n")
    sys.exit(code)


_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG})
"""Errors of a path that would occur at each attempt: this user may not use it, or no user can."""


def _end_with(error: OSError) -> tuple[int, str]:
    """Return exit code and line for an output or a path that cannot be used; raise any other error."""
    if (lost := lost_output(error)) is not None:
        return lost.exit_code, lost.line
    if error.errno not in _LASTING or error.filename is None:
        raise error
    return REFUSED, redact_text(f"{error.filename}: {error.strerror}; name a path that user {os.getuid()} can use")


def conceal_arguments(secret_flags: Iterable[str] = ()) -> None:
    """Mask secrets in `sys.argv`, because W&B uploads it and run records repeat it."""
    sys.argv[1:] = redact_arguments(sys.argv[1:], secret_flags=secret_flags)


def program_name() -> str:
    """Return the name under which this process was started, without its folder."""
    return Path(sys.argv[0]).name


def _print_version() -> int:
    sys.stdout.write(f"{version_line(program_name())}\n")
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser that raises our error, where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _HelpFormatter(argparse.HelpFormatter):
    """A help formatter that shows one spelling of each flag: argparse would repeat each with its value's name."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings: dict[str, str] = {}
        for flag in action.option_strings:
            spellings.setdefault(flag.replace("_", "-"), flag)
        value = self._format_args(action, action.metavar if isinstance(action.metavar, str) else action.dest)
        return " ".join(filter(None, [", ".join(spellings.values()), value if action.nargs != 0 else ""]))


def _collect(
    model: type[BaseModel],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    section: str | None,
    defaults: Mapping[str, object],
    adapt: Adapt | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings (flags over files over defaults) and the arguments that are not the model's."""
    options = list_options(model)
    shown = [_with_default(option, defaults) for option in options]
    parsed, rest = _build_parser(shown, prog=prog, description=description).parse_known_args(list(argv))
    conceal_arguments(flag for option in options if option.secret for flag in option.flags)
    _refuse_two_names(argv, options)
    values: dict[str, Any] = merge({}, defaults)
    for path in parsed.config:
        values = merge(values, read_config_file(model, path, section=section, adapt=adapt))
    for option in options:
        given = getattr(parsed, option.path, None)
        if given is not None:
            _assign(values, option, given)
    return values, rest


def _refuse_two_names(argv: Sequence[str], options: Iterable[Option]) -> None:
    """Raise `ConfigError` for a setting that is given under two of its names: one of the values would be lost.

    The values of a list add up, and a name that is repeated has its last value, as is usual.
    """
    paths = {flag: option.path for option in options if option.kind not in {"list", "json"} for flag in option.flags}
    given: dict[str, str] = {}
    for word in argv:
        name = word.partition("=")[0].replace("--no-", "--", 1)
        if (path := paths.get(name)) is None:
            continue
        spelt = name.replace("_", "-")
        if (before := given.setdefault(path, spelt)) != spelt:
            raise ConfigError(f"{before} and {spelt} are one setting; leave one of them out")


def _build_parser(options: Sequence[Option], *, prog: str, description: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [options]",
        description=description,
        epilog="Names may be written with _ for - as well.",
        formatter_class=_HelpFormatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML file under the flags; repeatable, merged."
    )
    # Only for the help: `run_cli` answers this flag before a parser exists.
    parser.add_argument(VERSION_FLAG, action="store_true", help="Print the version and exit.")
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        option.add_to(groups[option.group])
    return parser


def _with_default(option: Option, defaults: Mapping[str, object]) -> Option:
    """Return the option as its help should show it: with the value from `defaults`, if they name this option."""
    value: object = defaults
    for part in option.path.split("."):
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(value, Mapping) or part not in value:
            return option
        value = value[part]
    return replace(option, default=value, required=False)


def _refuse_unknown(argument: str, model: type[BaseModel]) -> NoReturn:
    if not argument.startswith("-"):
        is_file = argument.endswith((".yaml", ".yml"))
        instead = f"a file of settings is named by --config {argument}" if is_file else "options start with --"
        raise ConfigError(f"unexpected argument {argument!r}; {instead}")
    flag = argument.split("=", 1)[0]
    remark = _remark_on(model, flag) or nearest(flag.replace("_", "-"), _known_flags(list_options(model)))
    raise ConfigError(f"unknown option {flag}{remark} (--help lists all)")


def _remark_on(model: type[BaseModel], name: str) -> str:
    """Return `: SENTENCE` for a flag or key that a model's `names_elsewhere` explains, else an empty text.

    That mapping holds names of other frameworks, each with the way to say the same here.
    """
    *groups, leaf = name.removeprefix("--").replace("-", "_").split(".")
    for group in groups:
        inner = nested_model(model.model_fields[group].annotation) if group in model.model_fields else None
        if inner is None:
            return ""
        model = inner
    sentences: Mapping[str, str] = getattr(model, "names_elsewhere", {})
    return f": {sentences[leaf]}" if leaf in sentences else ""


def _known_flags(options: Sequence[Option]) -> list[str]:
    return ["--config", *(option.flags[0] for option in options)]


def _select_section(model: type[BaseModel], content: dict[str, Any], section: str | None) -> dict[str, Any]:
    if section is None:
        foreign = set(RUN_FILE_SECTIONS) - set(model.model_fields)
        return {key: value for key, value in content.items() if key not in foreign}
    if not set(RUN_FILE_SECTIONS) & set(content):
        return content
    return content.get(section) or {}


def check_keys(model: type[BaseModel], values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the values by field name, from aliases and kebab case too; refuse unknown keys with the nearest field, and
    a setting that is given under two of its names: one of the values would be lost.
    """
    names = _names_of_fields(model)
    checked: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in values.items():
        name = names.get(str(key).replace("-", "_"))
        if name is None:
            if model.model_config.get("extra") != "forbid":
                checked[str(key)] = value
                continue
            raise ConfigError(f"{where}: unknown key {key!r}{_remark_on(model, str(key)) or nearest(str(key), names)}")
        if (before := spelt.setdefault(name, str(key))) != str(key):
            raise ConfigError(f"{where}: {before!r} and {key!r} are one setting; leave one of them out")
        annotation = model.model_fields[name].annotation
        nested = nested_model(annotation)
        if nested is not None and value is None and not takes_null(annotation):
            continue  # a section with nothing in it, as when all its lines are comments
        deeper = nested is not None and isinstance(value, Mapping)
        checked[name] = check_keys(nested, value, where=f"{where}: {name}") if nested and deeper else value
    return checked


def _names_of_fields(model: type[BaseModel]) -> dict[str, str]:
    names = {name: name for name in model.model_fields}
    for option in list_options(model):
        if not option.group:
            names.update({alias.replace("-", "_"): option.path for alias in option.aliases})
    return names


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by `over`; nested mappings are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _assign(values: dict[str, Any], option: Option, given: object) -> None:
    *parents, leaf = option.path.split(".")
    place = values
    for parent in parents:
        below = place.get(parent)
        if isinstance(below, BaseModel):
            below = below.model_dump()
        if isinstance(below, list):
            if len(below) != 1:
                raise ConfigError(f"{option.flags[0]}: {parent} is a list of {len(below)} in the files; set it there")
            below = below[0].model_dump() if isinstance(below[0], BaseModel) else below[0]
        if below is not None and not isinstance(below, Mapping):
            shown = json.dumps(redact(below), default=str)
            raise ConfigError(f"{option.flags[0]}: {parent} takes settings by their names, and the files have {shown}")
        place[parent] = dict(below or {})
        place = place[parent]
    place[leaf] = option.decode(given)


def _is_other_form(place: Sequence[int | str], problems: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if the value at `place` failed this member of a union at once, and another member only deeper."""
    deeper = (other["loc"] for other in problems if len(other["loc"]) > len(place))
    return _is_form(place[-1:]) and any(tuple(other[: len(place) - 1]) == tuple(place[:-1]) for other in deeper)


def _is_form(place: Sequence[int | str]) -> bool:
    """Return True if a place ends in a type name, by which pydantic tells the members of a union apart."""
    return any(isinstance(part, str) and ("[" in part or part[:1].isupper()) for part in place[-1:])


def _describe(problem: Mapping[str, Any], secret_paths: Container[str]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    parts = [str(part) for part in problem["loc"] if not _is_form([part])]
    if not parts:
        return message
    flag = "--" + ".".join(parts).replace("_", "-")
    if problem["type"] == "missing":
        return f"{flag} is required"
    if ".".join(part for part in parts if not part.isdigit()) in secret_paths or names_secret(parts[-1]):
        return f"{flag}: {message}"
    if problem["type"] == "dict_type":
        message = "write NAME=VALUE, or one JSON object; in a file a mapping"
    value = problem.get("input")
    # A flag is always text: YAML has made `yes` a bool, 2024-01-01 a date and 100:4 the number 6004.
    quotes = problem["type"] == "string_type" and isinstance(value, int | float | date)
    hint = f", which is {type(value).__name__} in YAML; put what the file has in quotes" if quotes else ""
    return f"{flag}: {message}, got {json.dumps(redact(value), default=str)}{hint}"
