"""The bridge token's file: private to its user, and removed by its own server only."""

from __future__ import annotations

import os

import pytest

from atropos_api.common.secrets import TokenUnreadable
from example_trainer.weight_protocol.manifest import (
    ManifestUnsafe,
    given_token,
    read_token,
    remove_token,
    write_token,
)

URL = "http://127.0.0.1:9001"


def test_what_is_written_is_private_and_read_back(tmp_path):
    path = write_token(tmp_path / "new", "secret", port=9001)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(str(path), URL) == "secret"
    assert read_token(str(tmp_path / "none"), URL) is None


def test_two_servers_that_are_given_one_directory_keep_their_tokens(tmp_path):
    """The second one's replaced the first one's, whose trainer was refused once it had been started again."""
    paths = [write_token(tmp_path, f"of {port}", port=port) for port in (9001, 9002)]
    assert [read_token(str(path), f"http://127.0.0.1:{9001 + i}") for i, path in enumerate(paths)] == [
        "of 9001",
        "of 9002",
    ]
    remove_token(tmp_path, "of 9002", port=9002)
    assert read_token(str(paths[0]), URL) == "of 9001"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_may_touch_is_not_read(tmp_path, mode):
    path = write_token(tmp_path, "secret", port=9001)
    path.chmod(mode)
    with pytest.raises(ManifestUnsafe, match="chmod 600"):
        read_token(str(path), URL)


def test_a_token_of_another_user_is_not_read(tmp_path, monkeypatch):
    path, ours = write_token(tmp_path, "secret", port=9001), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: ours + 1)
    with pytest.raises(ManifestUnsafe):
        read_token(str(path), URL)


def test_a_server_gets_no_token_but_its_own_and_nothing_from_another_file(tmp_path):
    """The content is sent to the address that names the file, and another user's process may answer there."""
    private = tmp_path / "id_rsa"
    private.write_text("secret\n")
    private.chmod(0o600)
    assert read_token(str(private), URL) is None
    path = write_token(tmp_path, "secret", port=9001)
    assert read_token(str(path), "http://127.0.0.1:9002") is None
    assert read_token(str(path), "http://another:9001") == "secret", "the host is known by several names"
    path.write_bytes(b"\xff\xfe")
    assert read_token(str(path), URL) is None


def test_the_token_that_is_given_comes_before_that_of_the_environment():
    inherited = {"ATROPOS_BRIDGE_TOKEN": "inherited"}
    assert [given_token(*each) for each in (("own", inherited), (None, inherited), (None, {}))] == [
        "own",
        "inherited",
        None,
    ]


@pytest.mark.parametrize("token", ["secret-of-a-file\n", "ein schlüssel"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token):
    """The trainer waited for a server that seemed not to answer, and the reason in its log held the token."""
    for origin, arguments in (("--bridge-token", (token, {})), (r"\$ATROPOS_BRIDGE_TOKEN", (None, _inherited(token)))):
        with pytest.raises(TokenUnreadable, match=rf"^{origin}: not a token; a token is one line") as caught:
            given_token(*arguments)
        assert token.strip() not in str(caught.value)


def _inherited(token):
    return {"ATROPOS_BRIDGE_TOKEN": token}


def test_a_server_removes_its_own_token_only(tmp_path):
    path = write_token(tmp_path, "of the next server", port=9001)
    remove_token(tmp_path, "of the next", port=9001)
    assert path.exists()
    remove_token(tmp_path, "of the next server", port=9001)
    assert not path.exists()
