"""Messages between ranks arrive bit for bit, execute nothing, and stay on this host where possible."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from example_trainer.distributed import ranks
from example_trainer.distributed.ranks import Ranks, decode, encode, joined_ranks
from example_trainer.errors import RanksFailed
from example_trainer.processes.ports import free_port
from example_trainer.weight_protocol import transfer
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup, Rendezvous
from example_trainer.weight_protocol.transfer import (
    INTERFACE_VARIABLES,
    is_loopback,
    local_address,
    make_store,
)

from .ranks import FORKS, run_ranks

TENSORS = (
    torch.tensor([1.5, -0.0, math.nan, math.inf]),
    torch.tensor([[1, 2], [3, 4]], dtype=torch.int64),
    torch.tensor([1.25, 3.0], dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor(7.0),
    torch.empty(0, 3),
    torch.arange(12).reshape(3, 4).T,
    torch.tensor([5]).expand(4)[:1],
)


class Evil:
    """An object that runs code in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**80,
        0.1 + 0.2,
        -0.0,
        "ä\u2028$kind",
        b"\x00\xff",
        Path("/a/b"),
        [1, [2, (3, "x")], {}],
        {"a": {1: (2.5, None)}, (1, 2): ["$kind"]},
        {"$kind": "tensor"},
    ],
)
def test_a_message_arrives_as_it_was_sent(value: object) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)
    assert math.copysign(1, found) == math.copysign(1, value) if isinstance(value, float) else True


def test_numbers_that_are_not_finite_arrive_too() -> None:
    found = decode(encode([math.nan, math.inf, -math.inf]))
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tensor.stride()}")
def test_a_tensor_arrives_bit_for_bit_among_others(tensor: torch.Tensor) -> None:
    first, found, last = decode(encode({"x": [torch.ones(3), tensor, torch.zeros(2)]}))["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert _bits(found) == _bits(tensor)
    assert torch.equal(first, torch.ones(3))
    assert torch.equal(last, torch.zeros(2))


def test_a_value_that_is_not_plain_data_is_refused_before_it_is_sent() -> None:
    with pytest.raises(TypeError, match="a Evil cannot be sent between ranks"):
        encode([Evil()])


def test_a_message_of_a_stranger_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    body = pickle.dumps(Evil())
    for message in (body, len(body).to_bytes(8, "little") + body):
        with contextlib.suppress(Exception):
            decode(message)
    assert list(tmp_path.iterdir()) == []


def exchange(ranks: Ranks) -> dict[str, Any]:
    """Exchange values of different sizes between the ranks, with torch's own exchange of objects forbidden."""

    def forbidden(*_: object) -> None:
        raise AssertionError("pickled")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        setattr(distributed_c10d, name, forbidden)
    value = {"rank": ranks.rank, "long": list(range(1000 * ranks.rank)), "tensor": torch.full((ranks.rank,), 2.0)}
    return {"gathered": ranks.gather(value), "led": ranks.on_main(lambda: (Path("x"), torch.arange(3), None))}


def test_ranks_exchange_messages_of_any_size_without_pickle(tmp_path: Path) -> None:
    for found in run_ranks(3, tmp_path / "meeting", exchange):
        assert [len(value["long"]) for value in found["gathered"]] == [0, 1000, 2000]
        assert [list(value["tensor"]) for value in found["gathered"]] == [[2.0] * rank for rank in range(3)]
        assert found["led"][0] == Path("x")


def test_no_module_of_the_trainer_unpickles() -> None:
    root = Path(ranks.__file__).parents[1]
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    for word in ("import pickle", "all_gather_object", "broadcast_object_list", "send_object_list", "cloudpickle"):
        assert [str(path) for path, text in texts.items() if word in text] == []


def test_loopback_is_recognised_by_address_and_by_name() -> None:
    assert [host for host in ("127.0.0.1", "127.0.1.1", "::1", "localhost") if not is_loopback(host)] == []
    assert [host for host in ("0.0.0.0", "192.0.2.1", "no-such-host.invalid", "") if is_loopback(host)] == []


def _addresses(before: set[Any]) -> set[str]:
    return {entry.laddr.ip for entry in _listening() - before}


def _listening() -> set[Any]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {entry._replace(fd=0) for entry in connections if entry.status == psutil.CONN_LISTEN}


def test_the_group_over_which_weights_are_sent_listens_on_loopback_alone() -> None:
    before = _listening()
    group = BroadcastGroup.join(Rendezvous("127.0.0.1", free_port(), 0, 1), torch.device("cpu"))
    try:
        assert _addresses(before) == {"127.0.0.1"}
    finally:
        group.close()


def test_a_group_that_meets_at_another_address_listens_where_that_address_is_reached_from() -> None:
    """Not where this machine's name leads, which is a loopback address on Debian."""
    own = local_address("192.0.2.1")
    if own is None:
        pytest.skip("this machine has no address but loopback")
    before = _listening()
    group = BroadcastGroup.join(Rendezvous(own, free_port(), 0, 1), torch.device("cpu"))
    try:
        assert _addresses(before) == {own}
    finally:
        group.close()


def rank_listening(port: int, results: Any) -> None:
    """Report the addresses on which rank 0 of two listens, and the variables for torch's network interfaces."""
    with joined_ranks(0, 2, f"tcp://127.0.0.1:{port}", device="cpu", timeout_seconds=60.0) as ranks:
        addresses = sorted({entry.laddr.ip for entry in _listening()})
        results.put((addresses, ranks.gather(0), [os.environ.get(name) for name in INTERFACE_VARIABLES]))


def rank_beside(port: int) -> None:
    with joined_ranks(1, 2, f"tcp://127.0.0.1:{port}", device="cpu", timeout_seconds=60.0) as ranks:
        ranks.gather(1)


def test_the_ranks_of_one_host_listen_on_loopback_alone_and_change_no_variable() -> None:
    port, results = free_port(), FORKS.Queue()
    processes = [
        FORKS.Process(target=rank_listening, args=(port, results)),
        FORKS.Process(target=rank_beside, args=(port,)),
    ]
    for process in processes:
        process.start()
    try:
        addresses, gathered, variables = results.get(timeout=60)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    assert addresses == ["127.0.0.1"]
    assert gathered == [0, 1]
    assert variables == [None, None]


@pytest.mark.parametrize("made", [0, 1], ids=["no group", "the group of all ranks"])
def test_a_rank_whose_others_end_while_the_groups_are_made_says_so_and_leaves_them(
    monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    groups, events = iter([object()] * made), list[str]()

    def new_group(*_: object, **__: object) -> object:
        events.append("on loopback" if os.environ.get(INTERFACE_VARIABLES[0]) else "anywhere")
        for group in groups:
            return group
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append("left"))
    meeting = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(ranks, "make_store", lambda *_, **__: None)
    with (
        pytest.raises(RanksFailed, match=r"rank 0 of 2 could not connect to the others .* Connection closed by peer"),
        joined_ranks(0, 2, meeting, device="cpu", timeout_seconds=5.0, tensor_parallel_size=2),
    ):
        pass
    assert events == [*["on loopback"] * (made + 1), "left"]


def test_for_an_address_of_no_interface_all_interfaces_are_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is so behind a NAT, where others reach this host by an address of none of its interfaces."""
    listen = transfer._listen
    assert listen("192.0.2.1", free_port()) is None
    monkeypatch.setattr(transfer, "_listen", lambda _, port: listen("192.0.2.1", port))
    before = _listening()
    store = make_store("localhost", free_port(), world_size=1, is_master=True, timeout=timedelta(seconds=10))
    found = _addresses(before)
    assert found
    assert found <= {"::", "0.0.0.0"}
    del store


def test_a_port_that_is_taken_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError, match="cannot listen on"):
        make_store(*taken.getsockname(), world_size=1, is_master=True, timeout=timedelta(seconds=5))


def _bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.clone(memory_format=torch.contiguous_format).reshape(-1).numpy().tobytes()
        if (tensor.dtype != torch.bfloat16)
        else _bits(tensor.view(torch.int16))
    )
