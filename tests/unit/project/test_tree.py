"""The tree stays readable: contracts of packages, sizes, first words, and few files per request."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("atropos_api", "environments", "example_trainer")
LONGEST_LINES = 450
SHORT_LINES = 40
QUESTION_WORDS = re.compile(r"(What|Who|Whose|Whether|How|Where|When|Which|Why|Whoever|Whatever)\b")
LONGEST_FUNCTION_LINES = 50
ENTRY_POINTS = {"__init__.py", "__main__.py", "cli.py", "grpo.py", "vllm_api_server.py"}
WORD_ON_STANDING_ALONE = re.compile(r"alone|apart|separate|of its own|entry point|program", re.IGNORECASE)


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Return docstrings, and the strings under attributes and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks"])
def test_no_docstring_begins_with_a_question_word(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.lineno}"
        for path in modules(folder)
        for text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if QUESTION_WORDS.match(str(text.value).strip())
    ]
    assert found == []


def test_every_folder_s_init_is_its_contract() -> None:
    unnamed = {}
    for path in modules(*PACKAGES):
        if path.name == "__init__.py" and path.parent.name != "tiny":
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert text is not None, path
            named = set(re.findall(r"`(\w+)/?`", text)) | {path.parent.name}
            others = {other.stem for other in path.parent.iterdir() if other.suffix == ".py" or other.is_dir()}
            missing = {name for name in others - named if name.isidentifier() and not name.startswith("_")}
            if missing and path.parent.name not in PACKAGES:
                unnamed[str(path.relative_to(ROOT))] = sorted(missing)
    assert unnamed == {}


def test_a_file_is_neither_too_long_nor_short_without_a_reason() -> None:
    for path in modules(*PACKAGES, "tests", "benchmarks"):
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        assert lines <= LONGEST_LINES, f"{path.relative_to(ROOT)}: {lines} lines; split it by what is read together"
        in_package = path.relative_to(ROOT).parts[0] in PACKAGES
        if in_package and lines < SHORT_LINES and path.name not in ENTRY_POINTS:
            said = ast.get_docstring(ast.parse(text)) or ""
            assert WORD_ON_STANDING_ALONE.search(said), f"{path.relative_to(ROOT)}: say why {lines} lines stand alone"


def test_a_function_is_seen_whole() -> None:
    too_long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": length
        for path in modules(*PACKAGES, "tests", "benchmarks")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION_LINES
    }
    assert too_long == {}


def test_requests_and_training_steps_enter_few_files(tmp_path: Path) -> None:
    """A submission enters 24, a batch 22; a timer that fires may add some, so the best of three counts."""
    spec = importlib.util.spec_from_file_location("call_trace", ROOT / "tests" / "call_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    traces = [module.trace_broker(tmp_path / str(number)) for number in range(3)]
    assert min(len(trace["submission"]) for trace in traces) <= 24, traces
    assert min(len(trace["batch"]) for trace in traces) <= 22, traces
    step = module.trace_training_step(tmp_path / "trainer")
    assert len(step) <= 28, step
