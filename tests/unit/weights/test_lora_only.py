"""The `lora_only` bridge against a scripted server: which answers it accepts, and which requests it sends."""

from __future__ import annotations

import pytest
import torch

from example_trainer.errors import ProofFailed, ServerRefused
from example_trainer.weight_protocol.client import ServerInfo
from example_trainer.weight_protocol.transfer import AdapterPayload
from example_trainer.weights.adapter_target import AtroposServer, ServerIdentity
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.testing import config_of

PAYLOAD = AdapterPayload.write({"a.lora_A.weight": torch.ones(2, 3)}, {"r": 2})
RIGHT, WRONG = PAYLOAD.digest(), AdapterPayload.write({"a.lora_A.weight": torch.zeros(2, 3)}, {"r": 2}).digest()


class Client:
    """One start of a scripted server, which records the adapters that it was to serve or to remove."""

    def __init__(self, *, digest=RIGHT, misplaced=(), refuses=False):
        self.told = {"digest": digest, "misplaced": list(misplaced), "boot_id": "boot"}
        self.refuses, self.asked = refuses, []

    def upload_adapter(self, *_):
        return self.told

    def check_adapter(self, _):
        return self.told

    def activate_adapter(self, name):
        if self.refuses:
            raise ServerRefused("it is gone", 404)
        self.asked.append(("activate", name))

    def unload_adapter(self, name):
        self.asked.append(("unload", name))

    def generate(self, _):
        raise AssertionError

    def close(self):
        pass


def test_an_adapter_that_arrived_with_another_checksum_is_refused():
    assert AtroposServer(Client()).send(3, PAYLOAD) == "boot"
    with pytest.raises(ProofFailed, match="version 3 arrived"):
        AtroposServer(Client(digest=WRONG)).send(3, PAYLOAD)


@pytest.mark.parametrize("wrong", [{"digest": WRONG}, {"misplaced": ["q_proj"]}])
def test_a_server_that_computes_with_other_tensors_is_found(wrong):
    AtroposServer(Client()).check(3, PAYLOAD)
    with pytest.raises(ProofFailed, match="other tensors"):
        AtroposServer(Client(**wrong)).check(3, PAYLOAD)


def test_a_bad_version_goes_only_once_a_good_one_is_served_again():
    client = Client()
    assert AtroposServer(client).restore(3, 2)
    assert client.asked == [("activate", "policy-v2"), ("unload", "policy-v3")]
    gone = Client(refuses=True)
    assert not AtroposServer(gone).restore(3, 2)
    assert gone.asked == []


@pytest.mark.parametrize(("served", "highest", "found"), [(4, 5, 5), (4, None, 4), (None, None, 0), (None, 5, 5)])
def test_versions_go_on_above_one_that_was_taken_back(tmp_path, served, highest, found):
    """After a failed proof a fresh run took the version again, and the server refused its name with 409 name-used."""
    bridge = LoraOnlyBridge(config_of("http://127.0.0.1:9", "m", weight_bridge_mode="lora_only", run_dir=tmp_path))
    client = Client()
    client.info = lambda: ServerInfo(boot_id="boot", policy_version=served, highest_version=highest)
    bridge._server = AtroposServer(client)
    assert bridge.highest_version() == found


@pytest.mark.parametrize(
    ("now", "needed"),
    [(("boot", 3), False), (("boots", 3), True), (("boo", 3), True), (("boot", None), True)],
)
def test_a_server_that_has_started_anew_or_serves_nothing_is_published_to(tmp_path, now, needed):
    bridge = LoraOnlyBridge(config_of("http://127.0.0.1:9", "m", weight_bridge_mode="lora_only", run_dir=tmp_path))
    server = AtroposServer(Client())
    server.identify = lambda: ServerIdentity(*now, 64)
    bridge._server, bridge._boot_id, bridge._has_published = server, "boot", True
    assert bridge.needs_publish() is needed
