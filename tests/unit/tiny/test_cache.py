"""Base models are found: one comes with the package, others are created once, and again if the recipe changes."""

import subprocess
import sys
import threading
import time

import pytest

from example_trainer.tiny import cache
from example_trainer.tiny.__main__ import main as describe_base
from example_trainer.tiny.cache import (
    BaseNotWritten,
    BaseReport,
    content_key,
    ensure_base,
    read_report,
    write_report,
)


@pytest.fixture
def makes(monkeypatch):
    """A counter of created models; creating one writes the two files that mark it complete."""
    made = []

    def make(task, seed, target):
        made.append((task, seed))
        time.sleep(0.05)  # another that wants it comes meanwhile
        target.mkdir()
        (target / cache.WEIGHTS_FILE).write_bytes(b"weights")
        write_report(target, BaseReport(task, seed, "hash", 0.25, 0.05, 13.0, 25.0, "key"))

    monkeypatch.setattr(cache, "_make", make)
    return made


def test_a_model_is_made_once(makes, tmp_path):
    first = ensure_base("chain", 3, tmp_path)
    assert ensure_base("chain", 3, tmp_path) == first
    assert ensure_base("chain", 4, tmp_path) != first
    assert ensure_base("add", 0, tmp_path) != first
    assert makes == [("chain", 3), ("chain", 4), ("add", 0)]
    assert read_report(first).pass_rate == 0.25


def test_two_that_want_the_same_model_make_it_once(makes, tmp_path):
    threads = [threading.Thread(target=ensure_base, args=("chain", 3, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert makes == [("chain", 3)]


def test_an_incomplete_model_is_made_again(makes, tmp_path):
    path = ensure_base("chain", 3, tmp_path)
    (path / cache.WEIGHTS_FILE).unlink()
    (path / cache.REPORT_FILE).unlink()
    path.rmdir()
    ensure_base("chain", 3, tmp_path)
    assert len(makes) == 2


def test_the_key_follows_the_recipe(monkeypatch, tmp_path):
    before = content_key("chain", 3)
    assert content_key("chain", 3) == before
    changed = tmp_path / "teacher.py"
    changed.write_text("CHAIN_WORKED = 1")
    sources = cache._recipe_sources()
    monkeypatch.setattr(cache, "_recipe_sources", lambda: [*sources, changed])
    assert content_key("chain", 3) != before


def test_the_environment_names_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path


def test_finding_a_cached_model_loads_no_torch():
    probe = "import sys, example_trainer.tiny; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_a_model_that_was_there_is_not_said_to_have_been_made(makes, tmp_path, capsys):
    for last_line in ("made in 25 s", "found"):
        assert describe_base(["--seed", "3", "--cache-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == last_line


@pytest.mark.parametrize("flag", ["--cache-dir", "--out"])
def test_a_folder_that_cannot_be_written_is_one_line(makes, tmp_path, flag):
    occupied = tmp_path / "a-file"
    occupied.write_text("")
    flags = ["--seed", "3", "--cache-dir", str(tmp_path / "cache"), flag, str(occupied / "below")]
    with pytest.raises(BaseNotWritten, match=f"{occupied}.* cannot be written .*name another"):
        describe_base(flags)


def test_a_folder_with_other_files_is_refused_and_a_base_may_be_copied_again(makes, tmp_path):
    flags = ["--seed", "3", "--cache-dir", str(tmp_path / "cache"), "--out"]
    for _ in range(2):
        assert describe_base([*flags, str(tmp_path / "copy")]) == 0
    mine = tmp_path / "mine/config.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(BaseNotWritten, match=f"--out {mine.parent}: holds other files; name a new or an empty folder"):
        describe_base([*flags, str(mine.parent)])
    assert [path.read_text() for path in mine.parent.iterdir()] == ["mine"]
