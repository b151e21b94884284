"""The page of an evaluation, `samples.html`: its metrics, and its samples with the worst first.

A sample is what an environment's `evaluate` made of it: numbers, and texts such as the question and the model's answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final

from atropos_api.common.html_pages import as_html, make_page
from environments.sdk.group_files import render_badge, render_turns

MOST_SAMPLES: Final = 2000
LONGEST_FACT: Final = 60
"""Characters of a value that stands in a line with others; longer ones have a box of their own."""
LONGEST_TITLE: Final = 90

SCORES: Final = ("score", "answer_reward", "reward")
"""Names under which a sample has its score: the first that it has counts."""
TITLES: Final = ("question", "prompt", "problem", "example_id")


def render_evaluation(title: str, metrics: Mapping[str, Any], samples: Sequence[Any]) -> str:
    rows = "".join(
        f"<tr><td>{as_html(name)}</td><td>{as_html(_short(value))}</td></tr>" for name, value in metrics.items()
    )
    figures = f'<section class="card"><h2>Metrics</h2><table><tbody>{rows}</tbody></table></section>'
    kept = [sample if isinstance(sample, Mapping) else {"sample": sample} for sample in samples]
    ranked = sorted(enumerate(kept, 1), key=lambda entry: _rank(entry[1]))[:MOST_SAMPLES]
    shown = "".join(_render_sample(number, sample) for number, sample in ranked)
    left = f'<p class="note">{len(samples) - MOST_SAMPLES} better ones are in samples.jsonl.</p>'
    more = left if len(samples) > MOST_SAMPLES else ""
    content = shown or '<p class="note">The environment kept none.</p>'
    return make_page(
        title, f'{figures}<section class="card"><h2>Samples, the worst first</h2>{content}{more}</section>'
    )


def _render_sample(number: int, sample: Mapping[str, Any]) -> str:
    score = _score_of(sample)
    badge = "" if score is None else render_badge(score)
    title = next((" ".join(str(sample[name]).split()) for name in TITLES if sample.get(name) is not None), "")
    shown = title if len(title) <= LONGEST_TITLE else f"{title[:LONGEST_TITLE]}…"
    return f"<details><summary>{number} {badge} {as_html(shown)}</summary>{_render_fields(sample)}</details>"


def _render_fields(sample: Mapping[str, Any]) -> str:
    """Return the short values as one line, and the others each as a text under its name; a chat as its turns."""
    facts, texts = [], []
    for name, value in sample.items():
        if name == "messages" and isinstance(value, list):
            texts.append(render_turns(value))
        elif _is_fact(value):
            facts.append(f"{as_html(name)} <b>{as_html(_short(value))}</b>")
        else:
            text = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False, default=str)
            texts.append(f'<div class="role">{as_html(name)}</div><pre class="turn">{as_html(text)}</pre>')
    return f'<p class="note">{" · ".join(facts)}</p>{"".join(texts)}'


def _is_fact(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_FACT and "\n" not in value
    return not isinstance(value, list | Mapping)


def _score_of(sample: Mapping[str, Any]) -> float | None:
    found = next((sample[name] for name in SCORES if name in sample), None)
    return float(found) if isinstance(found, Real) else None


def _rank(sample: Mapping[str, Any]) -> float:
    score = _score_of(sample)
    return float("inf") if score is None else score


def _short(value: Any) -> str:
    return f"{float(value):.4g}" if isinstance(value, Real) and not isinstance(value, int) else str(value)
