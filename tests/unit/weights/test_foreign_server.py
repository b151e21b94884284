"""Servers that are not ours: where an adapter goes, and under which name clients find it."""

from __future__ import annotations

import pytest
import torch

from example_trainer.weights.adapter_payload import AdapterPayload
from example_trainer.weights.errors import ServerRefused
from example_trainer.weights.foreign import ForeignServer


class Routes:
    """A server of these routes alone, and what it was asked there."""

    def __init__(self, *routes):
        self.routes, self.asked = routes, []

    def call(self, _method, path, body=None):
        if path not in self.routes:
            raise ServerRefused(f"no route {path}", 404)
        self.asked.append((path, *(body or {}).values()))
        return {}

    def close(self):
        pass


@pytest.mark.parametrize(
    ("route", "name"), [("/v1/load_lora_adapter", "policy-v7"), ("/lora/load", None)], ids=["stock", "atropos"]
)
def test_r23_only_where_adapters_are_told_apart_by_name_clients_are_given_one(tmp_path, route, name):
    routes = Routes(route)
    server = ForeignServer(routes, tmp_path, model="m", keep=2)
    payload = AdapterPayload.write({"a.lora_A.weight": torch.ones(2, 3)}, {"r": 2})
    server.send(7, payload)
    assert server.policy_name(7) == name
    assert [(path, set(told)) for path, *told in routes.asked] == [(route, {"policy-v7", str(tmp_path / "policy-v7")})]
