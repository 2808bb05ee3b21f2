"""A process group of its own between a trainer and its rollout workers, for one weight update.

The backend objects are built directly, not through `torch.distributed.new_group`: the group needs no default group,
exists beside whatever the engine has set up, and NCCL cannot make it by splitting the engine's own communicator (an
engine that binds its default group to a device would then receive into an uninitialised buffer and report success).
"""

import contextlib
import datetime
import socket

import torch
import torch.distributed as dist

from headwater.errors import InvalidArgument, Unavailable
from headwater.rollout.v1.weights_pb2 import Transport
from headwater.rpc.address import local_address


def serve_store(host: str, timeout_s: float) -> dist.TCPStore:
    """The rendezvous of an update, served by the sender on a free port (`.port`) of `host`, and of no other address.

    Raises `InvalidArgument` when `host` is no address of this machine.
    """
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidArgument(
            f"the weight update cannot listen on {host}: {error.strerror or error}; give an address of this machine "
            "that workers reach with --weight-host",
            field="weight_host",
        ) from error
    port, timeout = listener.getsockname()[1], datetime.timedelta(seconds=timeout_s)
    # Left to itself, TCPStore listens on every interface.
    return dist.TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the sender's rendezvous. Raises `Unavailable` when it does not answer in time."""
    try:
        return dist.TCPStore(host, port, None, False, datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise Unavailable(f"the rendezvous {host}:{port} of the weight update cannot be reached: {error}") from error


class WeightGroup:
    """One member of the group. Rank 0 sends, all others receive. Not thread-safe."""

    def __init__(
        self, transport: "Transport.ValueType", store: dist.Store, *, rank: int, world_size: int, name: str, host: str,
        timeout_s: float,
    ) -> None:  # fmt: skip
        """Join; returns when every rank has joined. Raises `Unavailable` after `timeout_s`."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(name, store)
        try:
            self._backend = _make_backend(transport, prefixed, rank, world_size, host, self._timeout)
        except RuntimeError as error:
            raise Unavailable(f"rank {rank} could not join the weight-update group {name}: {error}") from error

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Broadcast `buffer` (uint8 [N]) from rank 0 in place; returns when the bytes have arrived on the device."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        try:
            self._backend.broadcast([buffer], options).wait(self._timeout)
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)
        except RuntimeError as error:
            raise Unavailable(f"the broadcast of {buffer.numel()} bytes failed: {error}") from error

    def close(self) -> None:
        """Leave the group, unblocking whoever waits in it. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._backend.abort()


def _make_backend(
    transport: "Transport.ValueType", store: dist.Store, rank: int, world_size: int, host: str,
    timeout: datetime.timedelta,
) -> "dist.ProcessGroupGloo":  # fmt: skip
    if transport == Transport.TRANSPORT_GLOO:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(host))]
        return dist.ProcessGroupGloo(store, rank, world_size, gloo)
    if transport == Transport.TRANSPORT_NCCL:
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise InvalidArgument("TRANSPORT_NCCL needs CUDA on every rank; use TRANSPORT_GLOO", field="transport")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, nccl)
    raise InvalidArgument(
        f"{Transport.Name(transport)} has no process group; use TRANSPORT_NCCL, TRANSPORT_GLOO or TRANSPORT_GRPC",
        field="rendezvous.transport",
    )
