"""Attaching: a manifest of another start is waited out, and memory that the server does not read is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from example_trainer.errors import ProofFailed
from example_trainer.weight_protocol.client import NotYet
from example_trainer.weights.attachment import _check_boot


@pytest.mark.parametrize("boot_id", ["0123456789abcdee", "0123456789abcde", ""])
def test_a_manifest_of_another_start_than_the_servers_is_not_the_one_to_attach_to(boot_id):
    manifest = SimpleNamespace(boot_id="0123456789abcdef")
    _check_boot(Path("m"), manifest, SimpleNamespace(boot_id=manifest.boot_id))
    with pytest.raises(NotYet, match="another start"):
        _check_boot(Path("m"), manifest, SimpleNamespace(boot_id=boot_id))


def test_a_server_that_reads_other_memory_than_is_mapped_here_is_found(shared, monkeypatch):
    _, bridge = shared()
    attachment = bridge._attach()
    attachment.check_memory()
    monkeypatch.setattr(attachment.client, "checksum", lambda: "of other memory")
    with pytest.raises(ProofFailed, match="does not serve what is written here"):
        attachment.check_memory()
    attachment.close()


def test_the_header_is_marked_before_the_first_weight_is_written_and_after_the_last(shared):
    fake, bridge = shared()
    policy = bridge.prepare()
    seen, write = [], policy.write_served

    def watched():
        seen.append((fake.server.fence.publishing, fake.server.header.state().torn))
        write()
        seen.append((fake.server.fence.publishing, fake.server.header.state().torn))

    policy.write_served = watched
    bridge._check.proven.add(bridge._attached.boot_id)
    bridge.publish(1)
    assert seen == [(True, True), (True, True)]
