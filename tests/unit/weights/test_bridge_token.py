"""The bridge token's file: private to its user, and taken away by its own server alone."""

from __future__ import annotations

import os

import pytest

from example_trainer.weight_protocol.manifest import ManifestUnsafe, read_token, remove_token, write_token


def test_what_is_written_is_private_and_read_back(tmp_path):
    path = write_token(tmp_path / "new", "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(str(path)) == "secret"
    assert read_token(str(tmp_path / "none")) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_may_touch_is_not_read(tmp_path, mode):
    path = write_token(tmp_path, "secret")
    path.chmod(mode)
    with pytest.raises(ManifestUnsafe, match="chmod 600"):
        read_token(str(path))


def test_a_token_of_another_user_is_not_read(tmp_path, monkeypatch):
    path, ours = write_token(tmp_path, "secret"), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: ours + 1)
    with pytest.raises(ManifestUnsafe):
        read_token(str(path))


def test_a_server_removes_its_own_token_only(tmp_path):
    path = write_token(tmp_path, "of the next server")
    remove_token(tmp_path, "of the next")
    assert path.exists()
    remove_token(tmp_path, "of the next server")
    assert not path.exists()
