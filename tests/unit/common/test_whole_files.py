"""Files are written whole or not at all, and never replace a file unless the command was told to."""

import os
import time

import pytest

from atropos_api.common.files import (
    FileInTheWay,
    OutputFile,
    RecentLines,
    free_path,
    replace_whole,
    write_directory,
    write_whole,
)
from tests.full_disk import files_of_at_most


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_replacement_leaves_the_old_content_and_nothing_beside(tmp_path):
    path = tmp_path / "picture.png"
    write_whole(path, "old")

    def fail(beside):
        assert beside.suffix == ".png"
        beside.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_whole(path, fail)
    assert (path.read_text(), names(tmp_path)) == ("old", ["picture.png"])


def test_nothing_is_at_its_place_before_the_end(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    with OutputFile(path) as output:
        output.write_line("ä")
        assert names(path.parent) == ["out.jsonl.part"]
        assert output.part.read_text() == "ä\n"
    assert (path.read_text(), names(path.parent)) == ("ä\n", ["out.jsonl"])


def test_a_file_that_appears_meanwhile_is_not_lost(tmp_path):
    path = tmp_path / "out"

    def write():
        with output:
            output.write_line("ours")
            path.write_text("theirs")

    output = OutputFile(path)
    with pytest.raises(FileInTheWay, match="has appeared meanwhile"):
        write()
    assert (path.read_text(), output.part.read_text()) == ("theirs", "ours\n")


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    forced = []
    sync, link = os.fsync, os.link

    def note_sync(descriptor):
        sync(descriptor)
        forced.append(os.fstat(descriptor).st_size)

    def note_link(*paths):
        forced.append("named")
        link(*paths)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note_link)
    with OutputFile(tmp_path / "out") as output:
        output.write_line("ours")
    assert forced == [5, "named"]


def test_without_links_it_is_renamed(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError("not here")

    monkeypatch.setattr(os, "link", no_links)
    with OutputFile(tmp_path / "out") as output:
        output.write_line("ours")
    assert names(tmp_path) == ["out"]


def test_what_is_there_is_refused_replaced_or_added_to(tmp_path):
    path = tmp_path / "out"
    path.write_text("old\n")
    with pytest.raises(FileInTheWay, match="is there already and is left as it is; try this"):
        OutputFile(path, hint="try this")
    with pytest.raises(FileInTheWay):
        OutputFile(tmp_path, overwrite=True)
    for options, content in (({"append": True}, "old\nnew\n"), ({"overwrite": True}, "new\n")):
        with OutputFile(path, **options) as output:
            output.write_line("new")
        assert path.read_text() == content


def test_a_full_disk_leaves_no_half_copy_of_the_file_that_is_appended_to(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(bytes(1 << 20))
    output = OutputFile(path, append=True)
    with files_of_at_most(1 << 19), pytest.raises(OSError, match="too large"):
        output.__enter__()
    assert not output.is_kept
    assert names(tmp_path) == ["out"], "the next command is not refused for a file in its way"


def test_lines_whose_write_failed_do_not_fail_again_when_their_file_is_closed(tmp_path):
    lines = RecentLines(tmp_path / "lines", keep=10, most_bytes=10**6)
    lines.append(b"first")
    with files_of_at_most(8):
        with pytest.raises(OSError, match="too large"):
            lines.append(b"second")
        lines.close()
    lines.append(b"third")
    lines.close()
    assert lines.path.read_bytes() == b"first\nthird\n"


def test_trimming_many_short_lines_takes_time_in_proportion_to_them(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%099d\n" % number for number in range(60_000)))
    began = time.process_time()
    RecentLines(path, keep=100_000, most_bytes=3 * 10**6).trim()
    assert time.process_time() - began < 5, "half a minute, where all lines left were measured again for each that goes"
    lines = path.read_bytes().splitlines()
    assert (len(lines), int(lines[0]), int(lines[-1])) == (30_000, 30_000, 59_999)


def test_two_commands_cannot_write_the_same_file(tmp_path):
    first, second = OutputFile(tmp_path / "out"), OutputFile(tmp_path / "out")
    with first:
        with pytest.raises(FileInTheWay, match="has just begun"):
            second.__enter__()
        with pytest.raises(FileInTheWay, match="a command writes to it"):
            OutputFile(tmp_path / "out")
        first.write_line("x")
    assert (tmp_path / "out").read_text() == "x\n"


def test_a_name_that_is_taken_is_numbered(tmp_path):
    for name in ("a.html", "a_1.html"):
        (tmp_path / name).touch()
    assert free_path(tmp_path / "a.html").name == "a_2.html"
    assert free_path(tmp_path / "b.html").name == "b.html"


@pytest.mark.parametrize("renamed", [True, False])
def test_a_directory_is_written_anew_after_a_kill_between_or_after_its_renames(tmp_path, renamed):
    made, old = tmp_path / "made", tmp_path / ".made.old"
    for directory in (made, old) if renamed else (old,):
        directory.mkdir()
        (directory / "file").write_text(directory.name)
    with pytest.raises(OSError, match="full"), write_directory(made):
        raise OSError("full")
    assert (made / "file").read_text() == ("made" if renamed else ".made.old")
    with write_directory(made) as partial:
        (partial / "file").write_text("new")
    assert (made / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
