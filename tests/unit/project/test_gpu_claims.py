"""Each claim about a GPU has a run that shows it, and `docs/explanation/gpu.md` agrees with its generator."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.gpu import page as pages
from tests.gpu import run
from tests.gpu.claims import CLAIMS, Claim, claim_of
from tests.gpu.page import Finding

ROOT = Path(__file__).resolve().parents[3]
GPU = ROOT / "tests" / "gpu"
UNMEASURED = re.compile(
    r"(nothing|none|neither|not|never)\b[^.|]{0,60}\b(run|made|measured|installed)\b[^.|]{0,20}\bGPU"
    r"|has not been run|was not repeated",
    re.IGNORECASE,
)
"""Words by which a page admits that something was not tried on a GPU."""


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_each_claim_about_a_gpu_is_recorded_by_the_file_that_it_names(claim: Claim) -> None:
    patterns = recorded_ids(GPU / claim.run)
    assert any(pattern.fullmatch(claim.id) for pattern in patterns), f"{claim.run} never records {claim.id}"


def recorded_ids(path: Path) -> list[re.Pattern[str]]:
    """Return the ids that a file passes to `record_claim`, with open parts where it formats them."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "record_claim"]
    return [pattern for call in named for pattern in run.patterns_in(call.args[0])]


def test_the_checks_record_no_claim_that_is_not_listed() -> None:
    recorded = {(path.name, pattern) for path in GPU.glob("test_*.py") for pattern in recorded_ids(path)}
    unknown = [
        f"{name}: {pattern.pattern}"
        for name, pattern in recorded
        if not any(claim.run == name and pattern.fullmatch(claim.id) for claim in CLAIMS)
    ]
    assert unknown == []


def test_no_two_claims_have_the_same_id() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)


def test_the_page_is_what_its_generator_prints_for_the_values_it_has() -> None:
    text = pages.PAGE.read_text(encoding="utf-8")
    assert pages.updated(text, {}, None, pages.marks(pages.documentation())) == text, (
        "run: python tests/gpu/run.py --print-page"
    )


def test_each_sentence_marked_as_a_claim_about_a_gpu_is_listed_and_each_promise_is_stated() -> None:
    stated = pages.marks(pages.documentation())
    assert sorted(set(stated) - {claim.id for claim in CLAIMS}) == []
    promises = {claim.id for claim in CLAIMS if claim.promises}
    assert sorted(promises - set(stated)) == []


def test_a_page_that_says_what_no_gpu_has_shown_links_to_the_list_of_what_was() -> None:
    unlinked = [
        page.name
        for page in pages.documentation()
        if UNMEASURED.search(page.read_text(encoding="utf-8"))
        and page != pages.PAGE
        and "gpu.md" not in page.read_text(encoding="utf-8")
    ]
    assert unlinked == []


def test_what_the_page_says_is_read_back_as_it_was_written() -> None:
    findings = {
        "packed-to-padded": Finding(1.52),
        "one-copy": Finding(0.31),
        "graph-reads-published": Finding(True),
        "mfu": Finding(0.314159),
        "nccl-abort": Finding(None, "part | of a\nreason"),
    }
    page = f"before\n{pages.BEGIN}\n{pages.END}\nafter\n"
    once = pages.updated(page, findings, "one GPU, torch 2.11", {})
    again, machine = pages.parse(once)
    assert machine == "one GPU, torch 2.11"
    assert again == findings | {"mfu": Finding(0.314), "nccl-abort": Finding(None, "part / of a reason")}
    assert pages.updated(once, {}, None, {}) == once
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    verdicts = {row[4].strip("`"): row[3] for row in rows_of(once)}
    assert verdicts["packed-to-padded"] == verdicts["graph-reads-published"] == "yes"
    assert verdicts["one-copy"] == "no"
    assert verdicts["mfu"] == "-"
    assert verdicts["memory-checkpointed"] == "not measured yet"


def test_values_of_another_machine_go_and_those_of_this_one_stay() -> None:
    page = pages.updated(f"{pages.BEGIN}\n{pages.END}\n", {"mfu": Finding(0.3)}, "GPU A", {})
    both, _ = pages.parse(pages.updated(page, {"one-copy": Finding(0.0)}, "GPU A", {}))
    assert set(both) == {"mfu", "one-copy"}
    other, machine = pages.parse(pages.updated(page, {"one-copy": Finding(0.0)}, "GPU B", {}))
    assert set(other) == {"one-copy"}
    assert machine == "GPU B"


def test_values_of_a_machine_whose_driver_has_another_patch_stay() -> None:
    """A lease begun again may get another machine of the same kind."""
    page = pages.updated(f"{pages.BEGIN}\n{pages.END}\n", {"mfu": Finding(0.3)}, "a GPU, driver 580.159.03", {})
    same, machine = pages.parse(pages.updated(page, {"one-copy": Finding(0.0)}, "a GPU, driver 580.159.04", {}))
    assert set(same) == {"mfu", "one-copy"}
    assert machine == "a GPU, driver 580.159.04"
    other, _ = pages.parse(pages.updated(page, {"one-copy": Finding(0.0)}, "a GPU, driver 590.1", {}))
    assert set(other) == {"one-copy"}


def test_a_value_is_judged_as_it_is_printed() -> None:
    claim = claim_of("packed-to-padded")
    assert claim.show(1.3496) == "1.35"
    assert claim.holds(1.3496)
    assert not claim.holds(1.34)
    assert not claim.holds(float("nan"))
    with pytest.raises(KeyError, match=r"no claim 'no-such'.*add it"):
        claim_of("no-such")


def rows_of(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
