"""The bridge between trainer and server: one copy of the weights, leases, torn and missing versions."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def problem_of(answer, status, kind):
    assert answer.status_code == status, answer.text
    assert answer.json()["type"].endswith(kind)
    return answer.json()["detail"]


def test_the_manifest_is_private_and_has_the_seeds_keys(shared_server):
    manifest = shared_server.manifest
    assert stat.S_IMODE(shared_server.manifest_path.stat().st_mode) == 0o600
    assert manifest.model == str(shared_server.model)
    mapping = manifest.param_mappings["model.layers.0.self_attn.qkv_proj.weight"]
    assert mapping.shape == [256, 128]
    assert mapping.dtype == "float32"
    assert mapping.ipc_handle["path"].startswith("/dev/shm/atropos-")
    assert manifest.unmapped == []


def test_every_checkpoint_tensor_lies_whole_in_the_servers_memory(shared_server, reference):
    """Weights are written through the map, and the server computes with them; padding of the vocabulary is left out."""
    manifest = shared_server.manifest
    assert set(manifest.tensors) == set(reference.base)
    for name, tensor in reference.base.items():
        pieces = manifest.tensors[name].pieces
        assert manifest.tensors[name].shape == list(tensor.shape)
        assert len(pieces) == 1
        assert pieces[0].shape == list(tensor.shape)


def test_one_copy_an_element_written_here_is_in_the_servers_checksum(shared_server):
    view = shared_server.weights()["model.norm.weight"][0][0]
    before = shared_server.checksum()
    kept = float(view[0])
    view[0] = kept + 1
    changed = shared_server.checksum()
    view[0] = kept
    assert changed != before
    assert shared_server.checksum() == before


def test_a_poll_reads_no_weights_and_a_checksum_has_to_be_asked_for_with_the_token(shared_server):
    token = {"Authorization": f"Bearer {shared_server.manifest.bridge_token}"}
    polled = shared_server.client.get("/bridge/debug", headers=token).json()
    assert (polled["checksum"], "checksum_seconds" in polled) == (None, False)
    problem_of(shared_server.client.get("/bridge/debug?checksum=true"), 401, "token-needed")
    asked = shared_server.client.get("/bridge/debug?checksum=true", headers=token).json()
    assert asked["checksum"] == shared_server.checksum()
    assert len(asked["per_tensor"]) == 8


def test_the_segment_is_as_large_as_the_weights_once(shared_server, reference):
    weights = sum(tensor.numel() * 4 for tensor in reference.base.values())
    padding = 2 * 64 * 128 * 4  # embedding and head are padded to a multiple of 64 rows
    (storage,) = shared_server.manifest.storages
    assert Path(storage.handle["path"]).stat().st_size == storage.nbytes
    assert weights <= storage.nbytes <= weights + padding + 64 * len(shared_server.manifest.param_mappings)


def test_changing_anything_needs_the_token_a_known_host_and_no_foreign_page(shared_server):
    token = f"Bearer {shared_server.manifest.bridge_token}"
    for path in (
        "publish/begin",
        "publish/renew",
        "publish/end",
        "publish/abort",
        "pause",
        "resume",
        "sleep",
        "wake_up",
    ):
        problem_of(shared_server.post(f"/bridge/{path}", {}), 401, "token-needed")
        problem_of(shared_server.post(f"/bridge/{path}", {}, Authorization="Bearer guess"), 401, "token-needed")
    rebound = shared_server.post("/bridge/pause", {}, Authorization=token, Host="attacker.example")
    problem_of(rebound, 403, "foreign-host")
    page = shared_server.post("/bridge/pause", {}, Authorization=token, Origin="http://attacker.example")
    problem_of(page, 403, "foreign-origin")
    assert shared_server.info()["paused"] is False


def test_only_one_publish_at_a_time_and_only_its_owner_ends_it(shared_server):
    publish = shared_server.begin(drain_seconds=0)
    problem_of(shared_server.bridge("publish/begin"), 409, "publish-in-progress")
    problem_of(shared_server.bridge("publish/end", {"publish_id": "other", "version": 99}), 409, "publish-lapsed")
    answer = shared_server.bridge("publish/abort", {"publish_id": publish["publish_id"]}).json()
    assert answer["torn"] is False
    assert shared_server.generate([5], max_tokens=1, compact=True)["policy_versions"] == [
        [[0, 1, shared_server.version]]
    ]


def test_an_end_that_is_repeated_gets_the_same_answer(shared_server):
    publish = shared_server.publish()
    again = shared_server.bridge(
        "publish/end", {"publish_id": publish["publish_id"], "version": publish["version"]}
    ).json()
    costs = ("recomputed_tokens", "fence_seconds", "expected_loss_seconds", "loss_seconds")
    assert again == {name: publish[name] for name in ("version", *costs)}


def test_a_version_is_never_reused_and_never_ends_half_written(shared_server):
    version = shared_server.version
    publish = shared_server.begin(drain_seconds=0)["publish_id"]
    reused = shared_server.bridge("publish/end", {"publish_id": publish, "version": version})
    problem_of(reused, 409, "version-not-new")
    header = shared_server.header()
    header.begin_write(version + 1)
    half = shared_server.bridge("publish/end", {"publish_id": publish, "version": version + 1})
    problem_of(half, 409, "write-incomplete")
    header.end_write(version + 1)
    assert shared_server.bridge("publish/end", {"publish_id": publish, "version": version + 1}).status_code == 200


def test_r26_a_lease_that_lapses_before_the_write_resumes_the_old_version(shared_server):
    version = shared_server.version
    shared_server.begin(lease_seconds=0.3, drain_seconds=0)
    reply = shared_server.generate([5], max_tokens=2, compact=True)  # waits at the gate until the lease has lapsed
    assert reply["policy_versions"] == [[[0, 2, version]]]


def test_r26_a_renewed_lease_does_not_lapse(shared_server):
    publish = shared_server.begin(lease_seconds=0.6, drain_seconds=0)["publish_id"]
    for _ in range(4):
        time.sleep(0.3)
        assert shared_server.bridge("publish/renew", {"publish_id": publish}).status_code == 200
    assert shared_server.info()["paused"] is True
    shared_server.bridge("publish/abort", {"publish_id": publish})


def test_r26_a_trainer_that_wakes_after_its_lease_may_not_write(shared_server, wait_until):
    from example_trainer.weight_protocol.shm_header import WriteRefused

    version = shared_server.version
    shared_server.begin(lease_seconds=0.1, drain_seconds=0)
    wait_until(lambda: not shared_server.info()["paused"])
    with pytest.raises(WriteRefused, match="lapsed"):
        shared_server.header().begin_write(version + 1)
    assert shared_server.header().state().torn is False


def test_r26_torn_weights_are_refused_until_a_complete_publish(shared_server, reference, wait_until):
    version = shared_server.version
    shared_server.begin(lease_seconds=0.3, drain_seconds=0)
    shared_server.header().begin_write(version + 1)  # and the trainer is killed here
    wait_until(lambda: shared_server.info()["torn"])
    for path, body in (
        ("/generate", {"prompt": [5]}),
        ("/v1/completions", {"model": str(shared_server.model), "prompt": [5]}),
    ):
        answer = shared_server.post(path, body)
        problem_of(answer, 503, "weights-torn")
        assert int(answer.headers["retry-after"]) >= 1
    problem_of(shared_server.client.get("/readyz"), 503, "weights-torn")
    assert shared_server.client.get("/health").status_code == 200
    assert shared_server.info()["paused"] is True

    publish = shared_server.begin(drain_seconds=0)["publish_id"]  # a new trainer
    header = shared_server.header()
    header.begin_write(version + 2)
    shared_server.write(reference.variant(2))
    header.end_write(version + 2)
    shared_server.bridge("publish/end", {"publish_id": publish, "version": version + 2})
    assert shared_server.info()["torn"] is False
    reply = shared_server.generate([5], max_tokens=2, compact=True)
    assert reply["policy_versions"] == [[[0, 2, version + 2]]]


def test_pausing_by_hand_refuses_and_resuming_serves(shared_server):
    shared_server.bridge("pause")
    assert shared_server.get("/bridge/is_paused") == {"is_paused": True}
    problem_of(shared_server.post("/generate", {"prompt": [5]}), 503, "paused")
    problem_of(shared_server.client.get("/readyz"), 503, "paused")
    shared_server.bridge("resume")
    assert shared_server.get("/bridge/is_paused") == {"is_paused": False}
    assert shared_server.get("/readyz") == {"status": "ready", "policy_version": shared_server.version}
    assert shared_server.generate([5], max_tokens=1)["token_ids"]


def test_a_publish_while_paused_by_hand_stays_paused_under_the_new_version(shared_server):
    shared_server.bridge("pause")
    version = shared_server.publish()["version"]
    problem_of(shared_server.post("/generate", {"prompt": [5]}), 503, "paused")
    shared_server.bridge("resume")
    assert shared_server.generate([5], max_tokens=1, compact=True)["policy_versions"] == [[[0, 1, version]]]


def test_sleeping_is_refused_without_sleep_mode(shared_server):
    problem_of(shared_server.bridge("sleep"), 409, "no-sleep-mode")
    assert shared_server.get("/bridge/is_sleeping") == {"is_sleeping": False}


def test_every_route_of_the_bridge_is_listed(shared_server):
    endpoints = set(shared_server.get("/bridge/list_endpoints")["endpoints"])
    names = ("info", "state_dict_info", "pause", "resume", "is_paused", "sleep", "wake_up", "is_sleeping", "debug")
    assert {f"/bridge/{name}" for name in names} | {"/generate", "/health", "/health_generate", "/metrics"} <= endpoints
    shapes = shared_server.get("/bridge/state_dict_info")
    assert shapes["tensors"]["model.norm.weight"] == {"shape": [128], "dtype": "float32"}
