"""A token from a file is read at start and again when asked for; an invalid one is refused without being shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_api.common.secrets import TokenAmbiguous, TokenSource, TokenUnreadable, read_token_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first-token\n")
    return path


def test_the_token_is_the_file_s_line(path: Path) -> None:
    assert read_token_file(path) == "first-token"


@pytest.mark.parametrize("content", [b"", b" \n", b"two words\n", b"two\nlines\n", "schlüssel".encode(), b"a\x00b"])
def test_a_text_that_is_not_a_token_is_reported_without_the_file_s_content(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(TokenUnreadable) as caught:
        read_token_file(path, flag="--api.token-file")
    assert str(caught.value) == (
        f"--api.token-file {path}: holds no token; a token is one line of letters, digits and . _ ~ + = -"
    )


@pytest.mark.parametrize("token", ["schlüssel", "two words", "line\nbreak"])
def test_a_token_that_no_header_can_carry_is_reported_by_where_it_came_from(token: str) -> None:
    with pytest.raises(TokenUnreadable, match=r"^\$ATROPOS_TOKEN: not a token; a token is one line"):
        TokenSource.settle(None, None, {"ATROPOS_TOKEN": token})
    with pytest.raises(TokenUnreadable, match=r"^--atropos-token: not a token; a token is one line"):
        TokenSource.settle(token, None, {}, flag="--atropos-token-file")


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TokenUnreadable, match=r"--token-file .*nowhere: cannot be read \(No such file"):
        TokenSource.settle(None, tmp_path / "nowhere", {})
    with pytest.raises(TokenUnreadable, match=r"\$ATROPOS_TOKEN_FILE .*Is a directory"):
        TokenSource.settle(None, None, {"ATROPOS_TOKEN_FILE": str(tmp_path)})


def test_what_is_given_comes_before_the_variables(path: Path) -> None:
    environ = {"ATROPOS_TOKEN": "variable", "ATROPOS_TOKEN_FILE": str(path)}
    assert TokenSource.settle("given", None, environ).value == "given"
    assert TokenSource.settle(None, path, environ).value == "first-token"
    assert TokenSource.settle(None, None, environ).value == "variable"
    assert TokenSource.settle(None, None, {"ATROPOS_TOKEN": "", "ATROPOS_TOKEN_FILE": str(path)}).value == "first-token"
    assert TokenSource.settle(None, None, {}).value is None


def test_two_ways_at_once_are_refused(path: Path) -> None:
    with pytest.raises(TokenAmbiguous, match=r"--atropos-token-file .* and --atropos-token are both given"):
        TokenSource.settle("given", path, {}, flag="--atropos-token-file")


def test_a_file_is_read_again_and_what_it_lacks_meanwhile_changes_nothing(path: Path) -> None:
    source = TokenSource(file=path)
    assert not source.reload()
    path.write_text("")
    assert not source.reload()
    path.unlink()
    assert not source.reload()
    assert source.value == "first-token"
    path.write_text("second-token\n")
    assert source.reload()
    assert source.value == "second-token"
    assert not TokenSource("given").reload()
