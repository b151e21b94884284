"""The folder of a user's own module is searched while the module is loaded, and the list of places is left in order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atropos_api.common.import_path import import_own, searched


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_folder_that_is_searched_already_keeps_its_place(tmp_path: Path) -> None:
    """`python -m` puts the working directory first: an import must not move it to the end."""
    sys.path.insert(0, str(tmp_path))
    before = list(sys.path)
    with searched(tmp_path):
        assert sys.path == before
    assert sys.path == before


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        ("sys.path.remove({here!r})", []),
        ("sys.path.insert(0, {here!r})", ["{here}"]),
        ("sys.path[:] = [each for each in sys.path if each != {here!r}]", []),
        ("sys.path = ['/own', *sys.path]", ["/own"]),
    ],
)
def test_a_module_may_change_the_places_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, left: list[str]
) -> None:
    name = f"own_module_{abs(hash(statement))}"
    (tmp_path / f"{name}.py").write_text(f"import sys\n{statement.format(here=str(tmp_path))}\nVALUE = 7\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert import_own(name).VALUE == 7
    assert sys.path == [*(each.format(here=tmp_path) for each in left), *before]


def test_a_module_that_fails_leaves_no_place_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_module_that_fails.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(RuntimeError, match="broken"):
        import_own("own_module_that_fails")
    assert sys.path == before
