"""Facts about an environment that can be known without starting it: `atropos doctor RUNFILE` and the launcher ask.

    python -m environments.facts arithmetic_server.py --env.task chain

imports the environment's module, reads its settings as `serve` would, and prints one JSON object. Its code runs in
this process only, so that whatever the module loads, prints or breaks stays here.

`CodeReader` reads in the source how a training rollout samples: from `collect_trajectories` it follows the calls of
the class's own methods and of functions of the same module. Values that are computed are not seen.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from atropos_api.common.errors import AtroposError
from atropos_api.common.files import expand_home
from atropos_api.common.import_path import import_file
from atropos_api.common.secrets import public_settings
from environments.commands import environment_names, load_environment
from environments.sdk.base_env import BaseEnv
from environments.sdk.config import APIServerConfig
from environments.sdk.environment import Environment
from environments.sdk.inference.sampling import TRUNCATING, masks_suffice
from environments.sdk.runtime.cli import read_command
from environments.sdk.tokenizer import load_tokenizer
from environments.tasks.data import DataFields

PROGRAM = "environments.facts"
PACKAGE = Path(__file__).resolve().parent
ROLLOUTS = ("collect_trajectories", "collect_trajectory", "collect")
SAMPLING_NAMES = frozenset({*TRUNCATING, "temperature", "stop"})
QUESTION, ANSWER = "What is two and two?", "Four."
WRITTEN_FOR_ATROPOS = (
    "start an unmodified environment of Atropos by itself, with atropos-compat FILE serve, beside a launch without "
    "--env, or import environments.sdk in its place (docs/howto/from-atropos.md)"
)
_CHATS, _TEXTS = "chat_completion", "completion"
_DATA_FIELDS = ("data_path", "val_data_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedParameter:
    """One sampling parameter with a fixed value, and its place: a line of the source, or a setting."""

    name: str
    value: Any
    where: str


@dataclass(slots=True, kw_only=True)
class Facts:
    """The answer about one environment; `error` is the reason why its module or settings cannot be used."""

    error: str | None = None
    refuses_settings: bool = False
    """True if the error is about the names or values of settings, wherever the environment runs."""
    missing_packages: list[str] = field(default_factory=list)
    missing_files: list[str] = field(default_factory=list)
    """Data files that the settings name and that are not here, each as `setting path`."""
    unusable_here: str | None = None
    """The reason why the environment would end while it starts on this machine: a name or file that does not exist."""
    env: Mapping[str, Any] = field(default_factory=dict)
    servers: list[Mapping[str, Any]] = field(default_factory=list)
    chats: bool = False
    """True if every rollout that can be seen in the source is a chat, so that a chat template is needed."""
    truncating: list[FixedParameter] = field(default_factory=list)
    """Parameters that make the sampled distribution differ from the model's."""
    maskable: bool = False
    """True if with sampling masks the ratio is exact under all of them together."""
    temperatures: list[FixedParameter] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    """Texts at which rollouts end, as far as they are constants or settings."""
    lenient: bool = False
    """True for environments of the original Atropos, whose groups may name no temperature."""
    after_answer: str | None = None
    """The text that the chat template writes after an answer; None without a template or if it fails."""
    template_error: str | None = None
    """The reason why the chat template is useless."""


def main(argv: Sequence[str]) -> int:
    """Print the facts of the environment that the first argument names; the rest are flags of `serve`."""
    server, *flags = argv
    with contextlib.redirect_stdout(sys.stderr):
        facts = find_facts(server, flags)
    sys.stdout.write(json.dumps(None if facts is None else asdict(facts), default=str) + "\n")
    return 0


def find_facts(server: str, flags: Sequence[str]) -> Facts | None:
    """Import an environment and return what can be known of it; whatever fails becomes `error`.

    None means that the module can be imported and shows no environment class, so that nothing is known.
    """
    try:
        env_cls = _find_class(server)
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        told = f"its module needs {package}, which is not installed"
        unusable = f"{told}; {WRITTEN_FOR_ATROPOS}" if package == "atroposlib" else None
        return Facts(error=unusable or told, missing_packages=[package], unusable_here=unusable)
    except AtroposError as error:
        return Facts(error=str(error))
    except LookupError:
        return None
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        return Facts(error=f"its module cannot be imported: {type(error).__name__}: {error}")
    reader = CodeReader(env_cls)
    facts = Facts(missing_packages=reader.missing_packages(), lenient=env_cls.lenient)
    try:
        command = read_command(env_cls, "serve", flags)
    except AtroposError as error:
        facts.error, facts.refuses_settings = str(error), True
        return facts
    facts.env = public_settings(command.env)
    facts.servers = [_server_facts(each) for each in command.servers]
    fixed = [*reader.fixed_parameters(), *_fixed_by_settings(facts.env)]
    facts.truncating = [one for one in fixed if one.name in TRUNCATING and one.value not in TRUNCATING[one.name]]
    facts.maskable = masks_suffice(one.name for one in facts.truncating)
    facts.temperatures = [one for one in fixed if one.name == "temperature"]
    facts.stops = _texts(facts.env.get("stop")) + [
        text for one in fixed if one.name == "stop" for text in _texts(one.value)
    ]
    facts.chats = _always_chats(reader, facts.env)
    paths = [(name, facts.env.get(name)) for name in _DATA_FIELDS]
    _render_chat(facts)
    try:
        command.env.check_names()
    except AtroposError as error:
        facts.error = facts.unusable_here = str(error)
    facts.missing_files = [f"{name} {path}" for name, path in paths if path and not expand_home(str(path)).exists()]
    # Environments of others may mean something else by these settings, or make the files when they start.
    if isinstance(command.env, DataFields) and Path(inspect.getfile(env_cls)).is_relative_to(PACKAGE):
        missing = [one for one in facts.missing_files if _evaluates(facts.env) or not one.startswith("val_")]
        if missing:
            facts.unusable_here = f"--env.{missing[0]}: there is no such file or folder; correct the path"
    return facts


def _evaluates(env: Mapping[str, Any]) -> bool:
    wanted = env.get("steps_per_eval") or env.get("eval_at_start") or env.get("eval_at_end")
    return bool(wanted and env.get("run_evaluation", True))


def _server_facts(server: APIServerConfig) -> dict[str, Any]:
    return {name: getattr(server, name) for name in ("server_type", "base_url", "tokenizer_name", "model_name")}


def _render_chat(facts: Facts) -> None:
    """Render a chat with the tokenizer that the settings name, if it is a directory here with a chat template."""
    folder = expand_home(facts.env.get("tokenizer_name") or "")
    if not (folder / "tokenizer.json").is_file():
        return
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        tokenizer = load_tokenizer(str(folder))
        if not isinstance(tokenizer.chat_template, str):
            return
        asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        _, found, after = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(ANSWER)
        facts.after_answer = after if found else None
        if QUESTION not in asked:
            facts.template_error = f"it leaves out the user's message: {asked[:80]!r}"
    except Exception as error:  # noqa: BLE001 - templates fail in as many ways as Python does
        facts.template_error = f"{type(error).__name__}: {error}"


def _texts(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else [str(text) for text in stop or ()]


def _fixed_by_settings(env: Mapping[str, Any]) -> list[FixedParameter]:
    named = [(name, env[name]) for name in sorted(SAMPLING_NAMES - {"stop"}) if env.get(name) is not None]
    return [FixedParameter(name=name, value=value, where=f"env.{name}") for name, value in named]


def _always_chats(reader: CodeReader, env: Mapping[str, Any]) -> bool:
    """Return True if every rollout needs a chat template; two of our settings choose between chat and text."""
    if not reader.chats or not reader.texts:
        return reader.chats
    if "prompt_form" in env:
        return bool(env["prompt_form"] == "chat")
    return "prompt_template" in env and env["prompt_template"] is None


def _find_class(server: str) -> type[Environment]:
    """Return the environment class that starts when `server` is run."""
    if server in environment_names():
        return load_environment(server)
    module = _load_file(expand_home(server)) if server.endswith(".py") else importlib.import_module(server)
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, BaseEnv)]
    own = [each for each in found if each.__module__ == module.__name__] or [each for each in found if each != BaseEnv]
    concrete = [each for each in own if not any(each in other.__mro__[1:] for other in own)]
    if not concrete:
        raise LookupError(f"no class of {server} derives from BaseEnv")
    return concrete[-1]


def _load_file(path: Path) -> ModuleType:
    """Import a file as Python runs it: with its folder first on the path, but not as `__main__`."""
    sys.path.insert(0, str(path.parent.absolute()))
    sys.argv[0] = str(path)  # by it `drop_foreign_keys` knows if a run file is for this environment
    return import_file(path)


Definition = ast.FunctionDef | ast.AsyncFunctionDef


class CodeReader:
    """The source of an environment class without the SDK's own part, and what rollouts do in it."""

    def __init__(self, env_cls: type[Environment]) -> None:
        self._trees = dict(self._sources(env_cls))
        self._module_constants = {
            place: {
                node.targets[0].id: node.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for place, tree in self._trees.items()
        }
        functions: dict[str, tuple[str, Definition]] = {}
        for place, tree in self._trees.items():
            for node in ast.walk(tree):
                if isinstance(node, Definition):
                    functions.setdefault(node.name, (place, node))
        self._functions = functions
        self._reached = list(self._follow(ROLLOUTS))
        names = {node.attr for _, body in self._reached for node in ast.walk(body) if isinstance(node, ast.Attribute)}
        self.chats = _CHATS in names
        self.texts = _TEXTS in names

    @staticmethod
    def _sources(env_cls: type[Environment]) -> Iterator[tuple[str, ast.Module]]:
        for base in env_cls.__mro__:
            if base.__module__.startswith(("environments.sdk", "builtins", "abc")):
                continue
            with contextlib.suppress(OSError, TypeError, SyntaxError):
                path = Path(inspect.getfile(base))
                yield str(path), ast.parse(path.read_text(encoding="utf-8"))

    def _follow(self, names: Sequence[str]) -> Iterator[tuple[str, Definition]]:
        """Yield the functions that rollouts enter: those named, and those of the class and the module they call."""
        waiting, seen = list(names), set(names)
        while waiting:
            found = self._functions.get(waiting.pop())
            if found is None:
                continue
            yield found
            for call in ast.walk(found[1]):
                name = _called(call)
                if name is not None and name not in seen:
                    seen.add(name)
                    waiting.append(name)

    def fixed_parameters(self) -> list[FixedParameter]:
        """Return the sampling parameters that rollouts give as constants."""
        return [
            FixedParameter(name=name, value=value, where=f"{Path(place).name}:{line}")
            for place, body in self._reached
            for node in ast.walk(body)
            for name, value, line in self._constants(node, self._module_constants[place])
        ]

    def _constants(self, node: ast.AST, named: Mapping[str, ast.expr]) -> Iterator[tuple[str, Any, int]]:
        pairs: list[tuple[Any, ast.expr]] = []
        if isinstance(node, ast.Call) and (_is_sampling(node) or _called(node) in self._functions):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            pairs = list(zip(keys, node.values, strict=True))
        for name, expression in pairs:
            if name in SAMPLING_NAMES:
                with contextlib.suppress(ValueError):
                    yield name, ast.literal_eval(_NamesReplaced(named).visit(deepcopy(expression))), expression.lineno

    def missing_packages(self) -> list[str]:
        """Return the packages that the source imports and needs and that are not installed."""
        needed: set[str] = set()
        for tree in self._trees.values():
            optional = {id(inner) for node in ast.walk(tree) if _goes_on_without(node) for inner in ast.walk(node)}
            for node in ast.walk(tree):
                if id(node) not in optional:
                    needed |= {name.partition(".")[0] for name in _imported(node)}
        return sorted(name for name in needed if name not in sys.modules and importlib.util.find_spec(name) is None)


class _NamesReplaced(ast.NodeTransformer):
    """Replaces the names of a module's constants by their values."""

    def __init__(self, named: Mapping[str, ast.expr]) -> None:
        self._named = named

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._named.get(node.id, node)


def _called(node: ast.AST) -> str | None:
    """Return the name of the function in `name(...)` or `self.name(...)`."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute) and _is_name(function.value, "self"):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _is_sampling(node: ast.Call) -> bool:
    """Return True for a completion of a session or of `self.server`; other models, such as a judge, train nothing."""
    function = node.func
    if not isinstance(function, ast.Attribute) or not function.attr.endswith("completion"):
        return False
    receiver = function.value
    ours = isinstance(receiver, ast.Attribute) and receiver.attr == "server" and _is_name(receiver.value, "self")
    return ours or isinstance(receiver, ast.Name)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _goes_on_without(node: ast.AST) -> bool:
    """Return True for a `try` whose handlers do not raise: an import inside it is optional."""
    if not isinstance(node, ast.Try) or not node.handlers:
        return False
    return not any(isinstance(inner, ast.Raise) for handler in node.handlers for inner in ast.walk(handler))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and not node.level else []
    if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
        first = node.args[0] if node.args else None
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
