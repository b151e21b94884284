"""Servers that are not ours get each adapter as a file, by the first of two routes that they have."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.errors import PublishFailed
from example_trainer.weights.adapter_payload import AdapterPayload
from example_trainer.weights.errors import ServerRefused
from example_trainer.weights.foreign import ForeignServer, write_adapter
from example_trainer.weights.server_client import ServerClient

NATIVE, CUSTOM, UNLOAD = "/v1/load_lora_adapter", "/lora/load", "/v1/unload_lora_adapter"


class Foreign:
    """A server that knows some routes, and notes what it is asked and whether the named file is whole then."""

    def __init__(self) -> None:
        self.routes = {NATIVE: 200, CUSTOM: 200, UNLOAD: 200}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.whole: list[bool] = []
        foreign = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                foreign.asked.append((self.path, body))
                path = body.get("lora_path") or body.get("adapter_path")
                if path is not None:
                    names = {file.name for file in Path(path).iterdir()}
                    foreign.whole.append(names == {"adapter_config.json", "adapter_model.safetensors"})
                answer = b"Success"
                self.send_response(foreign.routes.get(self.path, 404))
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    made = Foreign()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


@pytest.fixture
def server(foreign: Foreign, tmp_path: Path) -> Iterator[ForeignServer]:
    made = ForeignServer(ServerClient(foreign.url), tmp_path, model="m", keep=2)
    yield made
    made.close()


def payload(value: float = 1.0) -> AdapterPayload:
    return AdapterPayload.write({"a.lora_A.weight": torch.full((2, 3), value)}, {"r": 2, "peft_type": "LORA"})


def test_vllms_own_route_comes_first_and_each_version_has_a_name_and_a_path_of_its_own(foreign, server, tmp_path):
    for version in (1, 2):
        server.send(version, payload(version))
    assert foreign.asked == [
        (NATIVE, {"lora_name": f"policy-v{version}", "lora_path": str(tmp_path / f"policy-v{version}")})
        for version in (1, 2)
    ], "and never load_inplace, with which vLLM reads the file again in every step"
    assert foreign.whole == [True, True]


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_without_that_route_is_asked_at_lora_load(foreign, server, tmp_path, status):
    foreign.routes[NATIVE] = status
    server.send(7, payload())
    assert foreign.paths() == [NATIVE, CUSTOM]
    assert foreign.asked[1][1] == {"adapter_path": str(tmp_path / "policy-v7"), "adapter_name": "policy-v7"}


def test_a_refusal_is_no_missing_route_and_is_told(foreign, server):
    foreign.routes[NATIVE] = 400
    with pytest.raises(ServerRefused, match="400"):
        server.send(7, payload())
    assert foreign.paths() == [NATIVE]


def test_the_newest_versions_stay_and_older_ones_go_with_their_files(foreign, server, tmp_path):
    for version in (1, 2, 3):
        server.send(version, payload(version))
    assert foreign.asked[-1] == (UNLOAD, {"lora_name": "policy-v1"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy-v2", "policy-v3"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PublishFailed, match="--run-dir"):
        write_adapter(payload(), tmp_path / "file" / "policy-v1")
