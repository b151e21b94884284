"""Servers that are not ours: the route for adapters, and the name under which clients find them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from example_trainer.errors import ServerRefused, ServerUnavailable
from example_trainer.weight_protocol.transfer import AdapterPayload
from example_trainer.weights.adapter_target import StockServer
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.testing import config_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Routes:
    """A server with only these routes, and its requests."""

    def __init__(self, *routes):
        self.routes, self.asked = routes, []
        self.loaded, self.lost = [], []
        """For each of the next exchanges, whether its request or its answer is lost."""

    def call(self, _method, path, body=None):
        if path == "/v1/models":
            return {"data": [{"id": name} for name in ["m", *self.loaded]]}
        if path not in self.routes:
            raise ServerRefused(f"no route {path}", 404)
        moment = self.lost.pop(0) if self.lost else None
        if moment != "request":
            self.take(path, body)
        if moment is not None:
            raise ServerUnavailable(f"{path}: the {moment} was lost")
        return {}

    def take(self, path, body):
        self.asked.append((path, *(body or {}).values()))
        if path == "/lora/load":
            return
        if body["lora_name"] in self.loaded and "unload" not in path:
            raise ServerRefused(f"{body['lora_name']} has already been loaded", 400)
        (self.loaded.remove if "unload" in path else self.loaded.append)(body["lora_name"])

    def close(self):
        pass


@pytest.mark.parametrize(("route", "name"), [(LOAD, "policy-v7"), ("/lora/load", None)], ids=["stock", "atropos"])
def test_r23_only_where_adapters_are_told_apart_by_name_clients_are_given_one(tmp_path, route, name):
    routes = Routes(route)
    server = StockServer(routes, tmp_path, model="m", keep=2)
    payload = AdapterPayload.write({"a.lora_A.weight": torch.ones(2, 3)}, {"r": 2})
    server.send(7, payload)
    assert server.policy_name(7) == name
    assert [(path, set(told)) for path, *told in routes.asked] == [(route, {"policy-v7", str(tmp_path / "policy-v7")})]


def test_the_proof_samples_a_stock_server_without_the_models_own_defaults(tmp_path):
    """With a top_k from generation_config.json the processed logprobs are not the trainer's: no publish was proven."""
    asked = {}

    def call(_method, _path, body):
        asked.update(body)
        return {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}]}

    server = StockServer(SimpleNamespace(call=call, close=None), tmp_path, model="m", keep=2)
    server._versions.append(3)
    request = {"prompt": {"prompt_token_ids": [5]}, "n": 1, "max_tokens": 1, "temperature": 1.0, "ignore_eos": True}
    assert server.generate(request)["logprobs"] == [[-0.5]]
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    assert {name: asked[name] for name in neutral} == neutral
    assert (asked["temperature"], asked["model"]) == (1.0, "policy-v3")


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_stock_server_whose_answer_is_lost_has_the_adapter_once_and_forgets_old_ones(tmp_path, lost):
    routes = Routes(LOAD, UNLOAD)
    server = StockServer(routes, tmp_path, model="m", keep=2)
    for version in (1, 2, 3):
        payload = AdapterPayload.write({"a.lora_A.weight": torch.full((2, 3), version)}, {"r": 2})
        routes.lost = [lost] if version == 2 else [None, lost]
        try:
            server.send(version, payload)
        except ServerUnavailable:
            server.send(version, payload)  # as the bridge does
        assert server.identify().policy_version == version
    assert routes.loaded == (
        ["policy-v1", "policy-v2", "policy-v3"] if lost == "request" else ["policy-v2", "policy-v3"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy-v2", "policy-v3"]


def test_a_run_goes_on_above_the_versions_that_an_earlier_one_has_left_at_a_stock_server(tmp_path):
    """Else its second version would have the name of another run's second, whose adapter vLLM keeps under it."""
    routes = Routes(LOAD, UNLOAD)
    routes.loaded = ["policy-v9", "policy-v10", "someone-s-policy-v99"]
    bridge = LoraOnlyBridge(config_of("http://127.0.0.1:9", "m", weight_bridge_mode="lora_only", run_dir=tmp_path))
    bridge._server = StockServer(routes, tmp_path, model="m", keep=2)
    assert bridge.highest_version() == 10
