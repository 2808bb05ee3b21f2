"""The ranks of a trainer: process group, small broadcasts and reductions. Only tensors travel, no pickled objects."""

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headwater.errors import HeadwaterError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
T = TypeVar("T")


class RunFailed(Exception):
    """The run cannot go on. Raised on every rank at the same place, so that the ranks stay in step."""


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which serves, feeds and publishes."""
        return self.rank == 0

    def broadcast(self, data: bytes | None = None) -> bytes:
        """The bytes that rank 0 gives; other ranks give None."""
        assert (data is not None) == self.is_first
        size = torch.tensor([len(data or b"")], dtype=torch.int64)
        dist.broadcast(size, 0)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(buffer):
            dist.broadcast(buffer, 0)
        return bytes(buffer.numpy())

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks, in fp64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over all ranks, in fp64. NaN counts as infinity."""
        return self._reduce([float("inf") if value != value else value for value in values], dist.ReduceOp.MAX)

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Run `action`, which must hold no collective, on this rank; raise `RunFailed` on all if it failed on any."""
        result, error = None, ""
        try:
            result = action()
        except (HeadwaterError, ValueError, OSError, RuntimeError) as failure:
            error = str(getattr(failure, "message", failure)) or type(failure).__name__
        first = int(self.largest([-self.rank if error else -self.world_size])[0])
        if first == -self.world_size:
            return result  # type: ignore[return-value]
        raise RunFailed(f"cannot {what}: {self._from(-first, error)}")

    def first_only(self, what: str, action: Callable[[], None]) -> None:
        """Run `action` on rank 0; raise `RunFailed` on all ranks if it failed."""
        self.together(what, action if self.is_first else lambda: None)

    def _from(self, source: int, text: str) -> str:
        """The text of rank `source`, on all ranks."""
        data = text.encode()[:4096]
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, source)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, source)
        return bytes(buffer.numpy()).decode(errors="replace")

    def _reduce(self, values: Sequence[float], operation: "dist.ReduceOp.RedOpType") -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()


def restarts_left() -> int:
    """How often torchrun would start the ranks again when one of them fails (its --max-restarts)."""
    most, so_far = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return most - so_far


@contextmanager
def join(device: str = "auto", timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """Join the process group that torchrun describes; without torchrun this process is the only rank.

    Control traffic is gloo on the CPU, gradients are NCCL on a GPU. Ranks of one machine talk over loopback only.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    backend = "cpu:gloo,cuda:nccl" if name == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    under_torchrun = "RANK" in os.environ
    if os.environ.get("MASTER_ADDR", "127.0.0.1") in _LOOPBACK and os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cuda":
        torch.cuda.set_device(local_rank)
    if under_torchrun:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    try:
        world_size = dist.get_world_size()
        torch_device = torch.device(name, local_rank) if name == "cuda" else torch.device("cpu")
        yield Ranks(dist.get_rank(), world_size, torch_device, init_device_mesh(name, (world_size,)))
    finally:
        dist.destroy_process_group()
