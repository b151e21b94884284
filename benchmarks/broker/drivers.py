"""Trainer and environments of one server, over the Atropos contract (both servers) or v1 (ours)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import orjson

from atropos_api.wire import columns_groups
from atropos_api.wire.columns import MEDIA_TYPE
from atropos_api.wire.groups import Group
from benchmarks.broker.client import Answer, Client, new_key
from benchmarks.broker.servers import Server
from benchmarks.broker.workload import SentGroup, Shape

ENVIRONMENTS = 8
MANY_STEPS = 10**6
JSON = "application/json"
GZIP_WBITS = 31

Encode = Callable[[int, SentGroup], bytes]
Decode = Callable[[Answer], list[dict[str, Any]]]


class Driver(Protocol):
    """A driver of one server: it submits groups and fetches batches."""

    server: Server

    def prepare(self, groups: Sequence[SentGroup]) -> None:
        """Encode the submissions in advance, so that the client's work is not measured."""

    def submit(self, group: SentGroup) -> None: ...

    def fetch(self) -> Answer | None:
        """Return the next batch, for which enough groups were submitted; None if the server has no batches."""

    def decode(self, answer: Answer) -> list[dict[str, Any]]: ...


class Legacy:
    """The Atropos contract; `zipped` is as its real clients do it: gzip 9, and a new connection for each request."""

    def __init__(self, server: Server, shape: Shape, *, zipped: bool = False) -> None:
        self.server = server
        self._zipped = zipped
        self._client = Client(server.port, keep=not zipped)
        register_legacy(self._client, shape)

    def prepare(self, groups: Sequence[SentGroup]) -> None:
        for group in groups if self._zipped else ():
            group.zipped  # noqa: B018 - compressed here, once

    def submit(self, group: SentGroup) -> None:
        if self._zipped:
            headers = {"content_encoding": "gzip", "content_type": JSON, "idempotency_key": new_key()}
            self._client.request("POST", "/scored_data", group.zipped, **headers)
        else:
            headers = {"content_type": JSON, "idempotency_key": new_key()}
            self._client.request("POST", "/scored_data", group.text, **headers)

    def fetch(self) -> Answer:
        return self._client.request("GET", "/batch", accept_encoding="gzip" if self._zipped else "identity")

    def decode(self, answer: Answer) -> list[dict[str, Any]]:
        body = answer.body
        if self._zipped and answer.encoding != "gzip":
            raise AssertionError("the answer was not compressed although it was asked for")
        text = b""
        while answer.encoding == "gzip" and body:
            member = zlib.decompressobj(GZIP_WBITS)
            text += member.decompress(body)
            body = member.unused_data
        batch: list[dict[str, Any]] = orjson.loads(text or body)["batch"]
        return batch


def register_legacy(client: Client, shape: Shape, environments: int = ENVIRONMENTS) -> list[int]:
    """Register a trainer that polls once, and its environments; return their ids."""
    client.call(
        "POST",
        "/register",
        {
            "wandb_group": "bench",
            "wandb_project": f"bench {new_key()}",
            "batch_size": shape.batch_size,
            "max_token_len": shape.length,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": MANY_STEPS,
        },
    )
    client.call("GET", "/batch")
    wanted = {"max_token_length": shape.length, "desired_name": "bench", "weight": 1.0, "group_size": shape.size}
    answers = [
        client.call("POST", "/register-env", wanted | {"min_batch_allocation": None}) for _ in range(environments)
    ]
    return [answer["env_id"] for answer in answers]


@dataclass(frozen=True)
class Form:
    """A form of v1: its name, how a submission is written, and how a batch is read."""

    media_type: str
    encode: Encode
    decode: Decode


def _json_submission(env_id: int, group: SentGroup) -> bytes:
    return b'{"environment_id":%d,"groups":[%s]}' % (env_id, group.text)


def _columns_submission(env_id: int, group: SentGroup) -> bytes:
    return columns_groups.encode_submission(env_id, [Group(**group.values)])


def _json_batch(answer: Answer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = orjson.loads(answer.body)["groups"]
    return groups


def _columns_batch(answer: Answer) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(group) for group in columns_groups.decode_batch(answer.body).groups]


IN_JSON = Form(JSON, _json_submission, _json_batch)
IN_COLUMNS = Form(MEDIA_TYPE, _columns_submission, _columns_batch)


class Native:
    """Our broker's v1: numbered batches, each committed before the next is requested."""

    def __init__(self, server: Server, shape: Shape, *, sent: Form = IN_JSON, wanted: Form = IN_JSON) -> None:
        self.server = server
        self._sent, self._wanted = sent, wanted
        self._client = Client(server.port)
        run = {"name": f"bench {new_key()}", "batch_size": shape.batch_size, "max_token_length": shape.length}
        self._run_id = self._client.call("POST", "/v1/runs", run | {"num_steps": MANY_STEPS})["run_id"]
        self._env_ids = [
            self._client.call(
                "POST",
                "/v1/environments",
                {"name": f"bench {index}", "group_size": shape.size, "max_token_length": shape.length},
            )["environment_id"]
            for index in range(ENVIRONMENTS)
        ]
        self._number = 0
        self._bodies: dict[int, bytes] = {}

    def prepare(self, groups: Sequence[SentGroup]) -> None:
        for group in groups:
            env_id = self._env_ids[group.values["env_id"]]
            self._bodies[group.mark] = self._sent.encode(env_id, group)

    def submit(self, group: SentGroup) -> None:
        headers = {"content_type": self._sent.media_type, "idempotency_key": new_key()}
        self._client.request("POST", "/v1/groups", self._bodies[group.mark], **headers)

    def fetch(self) -> Answer:
        if self._number:
            self._client.call("POST", f"/v1/batches/{self._number}/commit", {"run_id": self._run_id})
        self._number += 1
        path = f"/v1/batches/{self._number}?wait=30&run_id={self._run_id}"
        return self._client.request("GET", path, accept=self._wanted.media_type, accept_encoding="identity")

    def decode(self, answer: Answer) -> list[dict[str, Any]]:
        return self._wanted.decode(answer)


class Echo:
    """A server that sends every body back; it takes submissions only, as it stores nothing."""

    def __init__(self, server: Server, shape: Shape) -> None:  # noqa: ARG002 - as the others
        self.server = server
        self._client = Client(server.port)

    def prepare(self, groups: Sequence[SentGroup]) -> None:
        """Return the groups as they are."""

    def submit(self, group: SentGroup) -> None:
        if self._client.request("POST", "/", group.text).body != group.text:
            raise AssertionError("the echo is another")

    def fetch(self) -> None:
        return None

    def decode(self, answer: Answer) -> list[dict[str, Any]]:
        raise NotImplementedError


def submit_all(driver: Driver, groups: Sequence[SentGroup], pool: ThreadPoolExecutor) -> None:
    for future in [pool.submit(driver.submit, group) for group in groups]:
        future.result()
