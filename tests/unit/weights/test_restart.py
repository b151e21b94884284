"""The restart bridge without a server: what it keeps on disk, and what it takes for served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from example_trainer.errors import ServerUnavailable
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights import restart
from example_trainer.weights.restart import RestartBridge, RestartOptions


@pytest.fixture
def bridge(tmp_path):
    vllm = VllmOptions(port=9, log_path=tmp_path / "vllm.log", served_model_name="m", tokenizer="m")
    options = RestartOptions(policy=PolicyOptions(model_name="m"), vllm=vllm, weights_dir=tmp_path / "served")
    return RestartBridge(options)


def test_of_the_weights_on_disk_those_that_are_served_stay(bridge, tmp_path):
    served = tmp_path / "served"
    for name in ("policy-v1", "policy-v12", ".policy-v3.part", "base"):
        (served / name).mkdir(parents=True)
    bridge._remove_all_but(served / "policy-v12")
    assert sorted(path.name for path in served.iterdir()) == ["base", "policy-v12"]


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
