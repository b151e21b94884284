"""Prompt templates: text files in which `{question}` stands for the question, everything else for itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atropos_api.common.errors import AtroposError

SHIPPED = Path(__file__).resolve().parent.parent / "prompts"
PLACE = "{question}"


class PromptTemplateUnusable(AtroposError):
    """A template file that is not there, or that has no place for the question."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with a place for a question. Braces elsewhere are kept, so LaTeX needs no escaping."""

    text: str

    def fill(self, question: str) -> str:
        return self.text.replace(PLACE, question)


def load_template(name: str) -> PromptTemplate:
    """A template by path, or one of those shipped here by its name (`r1_zero` or `r1_zero.prompt`)."""
    shipped = {path.stem: path for path in SHIPPED.glob("*.prompt")}
    path = Path(name).expanduser()
    if not path.is_file():
        path = shipped.get(name.removesuffix(".prompt"), path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptTemplateUnusable(
            f"prompt template {name}: cannot be read ({error}); give a file, or one of {', '.join(sorted(shipped))}"
        ) from error
    if PLACE not in text:
        raise PromptTemplateUnusable(f"prompt template {name}: it has no {PLACE}, the place of the question")
    return PromptTemplate(text)
