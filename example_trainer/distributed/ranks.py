"""The ranks of a training run: processes that train one policy together, each on whole groups of its own.

One process is the ordinary case and needs no `torch.distributed`: `Ranks` handles it, and every sum equals its input.
`joined_ranks` makes `GroupRanks` for several processes. Ranks exchange decisions and measurements in small messages
over gloo; gradients use the device's own backend. A message is JSON followed by the bytes of tensors, never pickle:
with pickle, any process that reaches the group's port could execute code in every rank.

All ranks must call the methods here in the same order, or they block. Work that only one process can do (call the
broker, own a server, write a file) is done by rank 0 in `on_main`, and the others get its result or its error.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn

from example_trainer.api import ends_batches
from example_trainer.errors import RanksFailed
from example_trainer.weight_protocol.transfer import default_group_near, make_store

_KIND: Final = "$kind"
_HEAD: Final = struct.Struct("<Q")


def encode(value: Any) -> bytes:
    """Encode `value` as bytes: None, numbers, texts, bytes, paths, CPU tensors, and lists, tuples, mappings of them."""
    tensors: list[Tensor] = []
    text = json.dumps(_pack(value, tensors)).encode()
    return b"".join([_HEAD.pack(len(text)), text, *map(_bytes_of, tensors)])


def decode(message: bytes) -> Any:
    """Return the value that `encode` was given; tuples, number keys and every bit of a tensor are preserved."""
    (length,) = _HEAD.unpack_from(message)
    start = _HEAD.size + length
    content = json.loads(message[_HEAD.size : start])
    return _unpack(content, _Blob(message, start))


def _bytes_of(tensor: Tensor) -> bytes:
    # An expanded tensor of one element counts as contiguous for any stride, so copy it into one with a normal stride.
    fresh = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return fresh.copy_(tensor.reshape(-1)).view(torch.uint8).numpy().tobytes()


class _Blob:
    """The tensor bytes of a message: `take` reads the tensors in the order in which they were packed."""

    def __init__(self, message: bytes, start: int) -> None:
        self._message = message
        self._at = start

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        flat = tensor.reshape(-1).view(torch.uint8)
        piece = self._message[self._at : self._at + flat.numel()]
        self._at += flat.numel()
        if piece:
            flat.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        return tensor


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {_KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        pairs = [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]
        return {_KIND: "mapping", "pairs": pairs}
    return (
        {_KIND: "tuple", "items": [_pack(item, tensors) for item in value]} if isinstance(value, tuple) else _tag(value)
    )


def _tag(value: Any) -> dict[str, str]:
    if isinstance(value, Path):
        return {_KIND: "path", "text": str(value)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    raise TypeError(f"a {type(value).__name__} cannot be sent between ranks; send its fields")


def _unpack(content: Any, blob: _Blob) -> Any:
    if isinstance(content, list):
        return [_unpack(item, blob) for item in content]
    if not isinstance(content, dict):
        return content
    kind = content[_KIND]
    if kind == "tensor":
        return blob.take(getattr(torch, content["dtype"]), content["shape"])
    if kind == "tuple":
        return tuple(_unpack(item, blob) for item in content["items"])
    if kind == "mapping":
        return {_unpack(key, blob): _unpack(item, blob) for key, item in content["pairs"]}
    return Path(content["text"]) if kind == "path" else bytes.fromhex(content["hex"])


ValueT = TypeVar("ValueT")
_TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """The ranks of a run with one process: this process is the only rank."""

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        """True if this process is rank 0, which acts for all ranks."""
        return self.rank == 0

    @property
    def data(self) -> Ranks:
        """The ranks that divide a batch's rows: all, or one of each tensor-parallel group, whose rows are the same."""
        return self

    def gather(self, value: ValueT) -> list[ValueT]:
        """Return every rank's value, in rank order; only small values of types that `encode` supports."""
        return [value]

    def on_main(self, action: Callable[[], ValueT]) -> ValueT:
        """Run `action` on rank 0 only and return its result on every rank; its error is raised on every rank."""
        return action()

    def have_heard(self, error: BaseException) -> bool:  # noqa: ARG002 - one process is told of its own errors
        """Return True if `on_main` has raised this error on every rank, so that all can still act together."""
        return True

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum over ranks the gradients of parameters that each rank holds whole."""

    def copy_from_main(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy rank 0's values into parameters that each rank holds whole."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over ranks of a small tensor on the CPU."""
        return values

    def max(self, count: int) -> int:
        """Return the largest of the ranks' counts."""
        return count

    def any(self, flag: bool) -> bool:
        """Return True if `flag` is true on at least one rank."""
        return flag


class GroupRanks(Ranks):
    """The ranks of a run with several processes: it uses the process groups that `joined_ranks` has made."""

    def __init__(self, control: dist.ProcessGroup, data: Ranks | None = None) -> None:
        self.rank = dist.get_rank(control)
        self.world_size = dist.get_world_size(control)
        self._control = control
        self._data = data
        self._heard: BaseException | None = None
        """The last error of rank 0 that every rank has been told; on the others the one that they raised for it."""

    @property
    def data(self) -> Ranks:
        return self if self._data is None else self._data

    def have_heard(self, error: BaseException) -> bool:
        return error is self._heard

    def gather(self, value: ValueT) -> list[ValueT]:
        own = _as_tensor(encode(value))
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.world_size)]
        with self._exchanging():
            dist.all_gather(sizes, torch.tensor([len(own)]), group=self._control)
            longest = int(max(sizes))
            found = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
            dist.all_gather(found, torch.nn.functional.pad(own, (0, longest - len(own))), group=self._control)
        return [decode(message[: int(size)].numpy().tobytes()) for message, size in zip(found, sizes, strict=True)]

    def on_main(self, action: Callable[[], ValueT]) -> ValueT:
        if not self.is_main:
            value, failure = decode(self._receive_from_main())
            if failure is not None:
                text, ends = failure
                words = f"rank 0 has failed, so rank {self.rank} stops too: {text}"
                self._heard = RanksFailed(words, ends_batches=ends)
                raise self._heard
            return cast("ValueT", value)
        try:
            led = action()
            message = encode((led, None))
        except Exception as error:
            if not self.have_heard(error):  # else a nested call has sent it already
                with suppress(
                    RanksFailed
                ):  # `error` is the cause and is raised, even if another rank has ended already
                    self._send_to_others(encode((None, (f"{type(error).__name__}: {error}", ends_batches(error)))))
                    self._heard = error
            raise
        self._send_to_others(message)
        return led

    def _send_to_others(self, message: bytes) -> None:
        self._broadcast_control(torch.tensor([len(message)]))
        self._broadcast_control(_as_tensor(message))

    def _receive_from_main(self) -> bytes:
        size = self._broadcast_control(torch.zeros(1, dtype=torch.long))
        message = self._broadcast_control(torch.empty(int(size), dtype=torch.uint8))
        return message.numpy().tobytes()

    def _broadcast_control(self, values: Tensor) -> Tensor:
        with self._exchanging():
            dist.broadcast(values, src=0, group=self._control)
        return values

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Raise `RanksFailed` if a rank has gone during the exchange in the context."""
        try:
            yield
        except RuntimeError as error:
            raise RanksFailed(
                f"rank {self.rank} of {self.world_size} has lost the others ({error}); the log of the rank that ended "
                "first has the cause"
            ) from error

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def copy_from_main(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        with self._exchanging():
            dist.all_reduce(total, group=self._control)
        return total

    def max(self, count: int) -> int:
        largest = torch.tensor([count])
        with self._exchanging():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control)
        return int(largest)

    def any(self, flag: bool) -> bool:
        return bool(self.max(int(flag)))


@contextmanager
def joined_ranks(
    rank: int,
    world_size: int,
    init_method: str,
    *,
    device: str,
    timeout_seconds: float,
    tensor_parallel_size: int = 1,
) -> Iterator[Ranks]:
    """Connect the `world_size` processes of a run during the context; raise `RanksFailed` if they do not connect.

    `init_method` is `env://` under torchrun and `accelerate launch`, else `tcp://host:port` or `file://path`. A rank
    waits for the others up to `timeout_seconds`, which must be longer than anything that rank 0 does alone.
    """
    if world_size == 1:
        yield Ranks()
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(_gpu(device, rank))
    _require_meeting_point(init_method, world_size)
    timeout = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    host, port = _meeting_point(init_method)
    with ExitStack() as joined:
        with default_group_near(host):
            try:
                if port is None:
                    dist.init_process_group(
                        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
                    )
                else:
                    store = make_store(host, port, world_size=world_size, is_master=rank == 0, timeout=timeout)
                    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
                joined.callback(dist.destroy_process_group)
                control = dist.new_group(backend="gloo", timeout=timeout)
                data = _data_ranks(rank, world_size, tensor_parallel_size, timeout)
            except (RuntimeError, ValueError, OSError) as error:
                raise RanksFailed(
                    f"rank {rank} of {world_size} could not connect to the others at --init-method {init_method}: "
                    f"{error}; start as many processes as --world-size says, each with a --trainer-rank of its own"
                ) from error
        yield GroupRanks(control, data)


def _data_ranks(rank: int, world_size: int, tensor_parallel_size: int, timeout: timedelta) -> Ranks | None:
    """Return the ranks that have the same place as this one in their tensor-parallel groups, None if there are no such
    groups; all ranks call this.
    """
    if tensor_parallel_size == 1:
        return None
    groups = [
        dist.new_group(list(range(place, world_size, tensor_parallel_size)), backend="gloo", timeout=timeout)
        for place in range(tensor_parallel_size)
    ]
    return Ranks() if world_size == tensor_parallel_size else GroupRanks(groups[rank % tensor_parallel_size])


def _meeting_point(init_method: str) -> tuple[str, int | None]:
    """Return the host of the rendezvous store, and its port if the ranks must create the store, else None."""
    try:
        if init_method.startswith("env://"):
            # torchrun runs the store in its own process; the ranks are only clients.
            own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) if own else None
        parts = urlsplit(init_method)
        if parts.scheme == "file" and not Path(parts.path).parent.is_dir():
            raise RanksFailed(
                f"--init-method {init_method}: there is no directory {Path(parts.path).parent}; create it"
            )
        return parts.hostname or "", parts.port if parts.scheme == "tcp" else None
    except ValueError as error:
        place = f"$MASTER_PORT {os.environ['MASTER_PORT']}" if init_method.startswith("env://") else init_method
        raise RanksFailed(f"--init-method {init_method}: {place} names no port ({error}); use 1 to 65535") from error


def _as_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _gpu(device: str, rank: int) -> int:
    """Return this process's GPU index: the one in `device`, else `LOCAL_RANK`, else `rank` modulo the GPU count."""
    named = torch.device("cuda" if device == "auto" else device).index
    return int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())) if named is None else named


def _require_meeting_point(init_method: str, world_size: int) -> None:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if init_method.startswith("env://") and missing:
        raise RanksFailed(
            f"--world-size {world_size} with --init-method env:// needs {' and '.join(missing)} in the environment; "
            "start with torchrun or accelerate launch, or name a meeting point: --init-method tcp://127.0.0.1:29500"
        )
