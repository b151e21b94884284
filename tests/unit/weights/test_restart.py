"""The restart bridge without a server: the files that it keeps, and the version that it believes served."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.errors import PublishFailed, ServerExited, ServerUnavailable
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights import restart, served_model
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.testing import config_of


@pytest.fixture
def bridge(tmp_path):
    return RestartBridge(config_of("http://127.0.0.1:9", "m", weight_bridge_mode="none", run_dir=tmp_path))


def test_of_the_weights_on_disk_those_that_are_served_stay(bridge, tmp_path):
    served = tmp_path / "served"
    for name in ("policy-v1", "policy-v12", ".policy-v3.part", "base"):
        (served / name).mkdir(parents=True)
    bridge._remove_all_but(served / "policy-v12")
    assert sorted(path.name for path in served.iterdir()) == ["base", "policy-v12"]


class Killed(BaseException):
    """Raised to end the trainer between two lines."""


def killing(number):
    """Return a trace function that ends the program before the given line of the modules that write and link."""
    left = [number]

    def trace(frame, event, _):
        if Path(frame.f_code.co_filename).name not in {"restart.py", "served_model.py", "files.py"}:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise Killed
        return trace

    return trace


class Server:
    """A stand-in for the manager: it reads the served weights at each start, as vLLM does."""

    url, token, running = "http://127.0.0.1:9", "t", True

    def __init__(self):
        self.starts = []
        self.standbys = 0

    def prepare_standby(self):
        self.standbys += 1

    def replace(self, model, *, version, adapter):
        (tensors,) = (load_file(path) for path in Path(model).glob("*.safetensors"))
        self.starts.append((str(model), adapter, version, float(tensors["weight"][0])))
        return SimpleNamespace(info=SimpleNamespace(dtype=None, head_dtype=None), gap_seconds=0.0, overlapped=True)


@pytest.fixture
def ready(bridge, monkeypatch, tmp_path):
    """Return the bridge with a policy of one tensor, and a server that only reads."""
    weight = torch.zeros(4)
    bridge._policy = SimpleNamespace(
        has_adapter=False,
        dtype=torch.float32,
        checkpoint_tensors=lambda _: {"weight": weight},
        hf_config=SimpleNamespace(to_dict=dict),
        tokenizer_name=str(tmp_path),
    )
    bridge._manager = Server()
    monkeypatch.setattr(restart, "check_server", lambda *_: None)
    monkeypatch.setattr(bridge, "_prove_or_put_off", lambda *_: None)
    return bridge, weight


def test_each_version_is_served_by_one_path_whose_weights_are_the_new_ones(ready, tmp_path):
    bridge, weight = ready
    for version in (1, 2):
        weight.fill_(version)
        bridge.publish(version)
    (first, second), link = bridge._manager.starts, tmp_path / "served" / "policy"
    assert first == (str(link), None, 1, 1.0)
    assert second == (str(link), None, 2, 2.0)
    assert link.resolve().name == "policy-v2"
    assert sorted(path.name for path in link.parent.iterdir()) == ["policy", "policy-v2"]


def test_the_next_servers_process_is_ready_after_each_publish_unless_told_not_to(ready, tmp_path):
    bridge, _ = ready
    for version in (1, 2):
        bridge.publish(version)
        assert bridge._manager.standbys == version
    for settings, standby in (
        ({}, True),
        ({"standby_server": False}, False),
        ({"restart_method": "reload"}, False),
    ):
        config = config_of("http://127.0.0.1:9", "m", weight_bridge_mode="none", run_dir=tmp_path, **settings)
        assert VllmOptions.of(config).standby == standby


@pytest.mark.parametrize("again", [False, True], ids=["next version", "same version"])
def test_no_kill_between_two_lines_of_a_publish_leaves_a_link_that_leads_to_no_whole_checkpoint(ready, tmp_path, again):
    bridge, weight = ready
    served, number, ended = tmp_path / "served", 0, False
    while not ended:
        number += 1
        shutil.rmtree(served, ignore_errors=True)
        bridge._version = 0
        weight.fill_(1)
        bridge.publish(1)
        weight.fill_(2)
        sys.settrace(killing(number))
        try:
            bridge.publish(1 if again else 2)
            ended = True
        except Killed:
            pass
        finally:
            sys.settrace(None)
        for link in served.glob("*policy*"):
            if link.is_symlink():
                assert (link / "config.json").is_file(), f"{link} leads nowhere after line {number}"
                assert len(load_file(link / "model.safetensors")["weight"]) == 4
        bridge.publish(3)
        assert (served / "policy").resolve().name == "policy-v3"
    assert number > 40


def failing(server, *exit_codes):
    """Let the next starts of the server fail, each with the next exit code."""
    left, works = list(exit_codes), server.replace

    def replace(*args, **options):
        if left:
            raise ServerExited("vLLM ended", exit_code=left.pop(0))
        return works(*args, **options)

    server.replace = replace


@pytest.mark.parametrize("exit_codes", [(-9,), (-9, -9, -15), (-9, 137)])
def test_a_server_that_is_killed_while_it_starts_is_started_again(ready, monkeypatch, exit_codes):
    monkeypatch.setattr(restart, "FIRST_PAUSE_SECONDS", 0.0)
    failing(ready[0]._manager, *exit_codes)
    assert ready[0].publish(1).version == 1
    failing(ready[0]._manager, -9, 1)
    assert ready[0].publish(2).version == 2, "settings that have worked fail by chance"


@pytest.mark.parametrize("exit_codes", [(1,), (2,), (-9, -9, -9, 137)])
def test_a_server_that_cannot_start_or_is_killed_each_time_fails_the_publish(ready, monkeypatch, exit_codes):
    monkeypatch.setattr(restart, "FIRST_PAUSE_SECONDS", 0.0)
    failing(ready[0]._manager, *exit_codes)
    with pytest.raises(PublishFailed, match="version 1 is not served: vLLM ended"):
        ready[0].publish(1)


def test_where_no_link_can_be_made_the_checkpoint_is_served_by_its_own_path(ready, tmp_path, monkeypatch, caplog):
    bridge, _ = ready
    bridge.publish(1)

    def refuse(*_, **__):
        raise PermissionError("this file system has no links")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    bridge.publish(2)
    assert bridge._manager.starts[-1][0] == str(tmp_path / "served" / "policy-v2")
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["policy-v2"], "no link to a removed file"
    assert "has no links" in caplog.text


def test_a_server_that_reads_new_weights_in_place_is_started_again_on_the_newest(ready, tmp_path, monkeypatch):
    bridge, weight = ready
    bridge._config = bridge._config.model_copy(update={"restart_method": "reload"})
    monkeypatch.setattr(bridge, "_reload", lambda *_: (SimpleNamespace(dtype=None, head_dtype=None), 0.0))
    for version in (1, 2):
        weight.fill_(version)
        bridge.publish(version)
    assert float(load_file(tmp_path / "served" / "policy" / "model.safetensors")["weight"][0]) == 2.0


def test_the_first_weights_that_each_server_reads_in_place_are_proven(ready, monkeypatch):
    """VLLM loads them by other code, which leaves the experts of a mixture unpacked where the start packs them."""
    bridge, _ = ready
    bridge._config = bridge._config.model_copy(update={"restart_method": "reload"})
    monkeypatch.setattr(bridge, "_reload", lambda *_: (SimpleNamespace(dtype=None, head_dtype=None), 0.0))
    checked = []

    def prove(_, version, __):
        checked.append(version)
        bridge._proven = True

    monkeypatch.setattr(bridge, "_prove_or_put_off", prove)
    for version in range(1, 8):
        bridge._manager.running = version not in {1, 4}  # the server starts for these, and reads the others
        bridge.publish(version)
    assert checked == [1, 2, 5]


@pytest.mark.parametrize(("dtype", "masters"), [(torch.bfloat16, "none"), (torch.float16, "host")])
def test_the_whole_policy_for_the_check_of_a_sharded_one_has_no_masters_on_the_gpu(
    bridge, tmp_path, monkeypatch, dtype, masters
):
    asked = []
    monkeypatch.setattr(served_model, "load_policy", asked.append)
    served_model.whole_policy(SimpleNamespace(is_sharded=True, dtype=dtype), bridge._options, tmp_path)
    assert (asked[0].master_weights, asked[0].sharding, asked[0].model_name) == (masters, None, str(tmp_path))


@pytest.mark.parametrize(("serves", "counts"), [(2, True), (1, False), (None, False)])
def test_a_reload_whose_answer_is_lost_counts_if_the_server_serves_that_version(
    bridge, tmp_path, monkeypatch, serves, counts
):
    class Client:
        def __init__(self, *_):
            pass

        def reload(self, *_, **__):
            raise ServerUnavailable("the answer was lost")

        def info(self):
            return SimpleNamespace(policy_version=serves)

        def close(self):
            pass

    monkeypatch.setattr(restart, "ServerClient", Client)
    manager = SimpleNamespace(url="http://127.0.0.1:9", token="t")
    if counts:
        assert bridge._reload(manager, tmp_path, 2)[0].policy_version == 2
    else:
        with pytest.raises(ServerUnavailable):
            bridge._reload(manager, tmp_path, 2)


@pytest.mark.parametrize(
    ("mode", "settings", "running", "overlapped", "told"),
    [
        ("none", {}, True, False, "--restart-method reload"),
        ("lora_restart", {}, True, False, "--weight-bridge-mode lora_only"),
        ("none", {}, True, True, None),
        ("none", {}, False, False, None),  # it had exited, which is another case
        ("none", {"restart_method": "reload"}, True, False, None),
    ],
)
def test_where_two_servers_do_not_fit_the_way_without_a_gap_is_recommended_once(
    tmp_path, caplog, monkeypatch, mode, settings, running, overlapped, told
):
    config = config_of("http://127.0.0.1:9", "m", weight_bridge_mode=mode, run_dir=tmp_path, **settings)
    made = RestartBridge(config)
    made._policy = SimpleNamespace(has_adapter=mode == "lora_restart")
    monkeypatch.setattr(restart, "link_served", lambda directory: directory)
    monkeypatch.setattr(made, "_reload", lambda *_: (_ for _ in ()).throw(ServerUnavailable("gone")))
    replacement = SimpleNamespace(info=None, gap_seconds=41.0, overlapped=overlapped)
    manager = SimpleNamespace(running=running, replace=lambda *_, **__: replacement)
    for version in (1, 2):
        made._serve(manager, tmp_path, version)
    said = [each.getMessage() for each in caplog.records if "no server answered for 41.0 s" in each.getMessage()]
    assert len(said) == (told is not None)
    assert told is None or told in said[0]
