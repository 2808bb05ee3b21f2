"""Which workers get which weights, and what happens to those that cannot take them."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import grpc
import torch

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import DataLoss
from headwater.rollout.v1.rollout_pb2 import GetWorkerInfoRequest, WorkerState
from headwater.rollout.v1.weights_pb2 import Transport
from headwater.router.v1 import router_pb2, router_pb2_grpc
from headwater.rpc.address import host_of, local_address
from headwater.rpc.channel import sync_channel
from headwater.rpc.errors import from_rpc_error
from headwater.weights.plan import DEFAULT_BUCKET_BYTES
from headwater_trainer.weight_epoch import Receiver, WeightEpoch, call_all, group_transport, open_receiver

log = logging.getLogger(__name__)

_RECEIVING_STATES = (WorkerState.WORKER_STATE_READY, WorkerState.WORKER_STATE_QUARANTINED)


@dataclass
class UpdateReport:
    """What one update did."""

    step: int
    epoch: int = 0
    transport: str = ""
    updated: list[str] = field(default_factory=list)  # worker ids
    lost: dict[str, str] = field(default_factory=dict)  # worker id -> why
    tensor_count: int = 0
    byte_count: int = 0
    seconds: float = 0.0


class WeightSender:
    """Pushes the weights of one component of one run into the workers that the router knows.

    Runs on rank 0, from one thread. Every wait ends after `timeout_s`; a worker that fails is quarantined at the router
    and the update is repeated, with a newer epoch, for the others.
    """

    def __init__(
        self, router_address: str, run_id: str, component: str, *, timeout_s: float = 30.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES, host: str | None = None,
    ) -> None:  # fmt: skip
        """`host` is the address at which workers reach this process; unset: the one the router is reached from."""
        self._router_channel = sync_channel(router_address)
        self._router = router_pb2_grpc.RouterServiceStub(self._router_channel)
        self._run_id = run_id
        self._component = component
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._host = host or local_address(host_of(router_address))
        self._epoch = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._step = 0

    def publish(self, named_tensors: Mapping[str, torch.Tensor], step: int) -> UpdateReport:
        """Send `named_tensors` (diffusers name → value) as version `step` of the run.

        The first call must hold every tensor of the component and goes to every worker; a later one may hold only what
        has changed, and goes to the workers that serve this run. The others are left to `catch_up`, for which the
        tensors are kept: do not write into them.
        """
        first = not self._tensors
        self._tensors |= named_tensors
        self._step = step
        with self._receivers() as workers:
            wanted = [w for w in workers if first or w.error or w.info.weight_version.run_id == self._run_id]
            return self._update(wanted, named_tensors)

    def catch_up(self) -> UpdateReport | None:
        """Send every tensor to the workers that do not serve the last version; None when all do."""
        if not self._tensors:
            return None
        version = WeightVersion(run_id=self._run_id, step=self._step)
        with self._receivers() as workers:
            behind = [w for w in workers if w.error is None and (_quarantined(w) or w.info.weight_version != version)]
            return self._update(behind, self._tensors) if behind else None

    def close(self) -> None:
        """Close the channel to the router."""
        self._router_channel.close()

    @contextlib.contextmanager
    def _receivers(self) -> Iterator[list[Receiver]]:
        """The workers of the router that take weights, asked themselves: the router's view lags by a heartbeat."""
        try:
            status = self._router.GetStatus(router_pb2.GetStatusRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        workers = [open_receiver(worker) for worker in status.workers if worker.report.state in _RECEIVING_STATES]
        try:
            request = GetWorkerInfoRequest()
            infos = call_all(workers, lambda w: w.stub.GetWorkerInfo.future(request, timeout=self._timeout_s))
            for worker in workers:
                worker.info = infos.get(worker.worker_id, worker.info)
            yield workers
        finally:
            for worker in workers:
                worker.channel.close()

    def _update(self, workers: list[Receiver], tensors: Mapping[str, torch.Tensor]) -> UpdateReport:
        """Push to workers: by process group first, over gRPC streams when no group works."""
        started = time.monotonic()
        report = UpdateReport(self._step)
        for transport in (group_transport(workers), Transport.TRANSPORT_GRPC):
            pending = [worker for worker in workers if worker.worker_id not in (*report.updated, *report.lost)]
            if pending:
                self._attempt(tensors, pending, transport, report)
        report.seconds = time.monotonic() - started
        return report

    def _attempt(
        self,
        tensors: Mapping[str, torch.Tensor],
        workers: list[Receiver],
        transport: "Transport.ValueType",
        report: UpdateReport,
    ) -> None:
        """One epoch. Workers that it updates enter `report.updated`; after the last transport the others are lost."""
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)  # newer than those of an earlier process, too
        version = WeightVersion(run_id=self._run_id, step=self._step)
        epoch = WeightEpoch(
            self._epoch, version, self._component, workers, transport,
            host=self._host, timeout_s=self._timeout_s, bucket_bytes=self._bucket_bytes,
        )  # fmt: skip
        plan = epoch.run(tensors)
        report.epoch, report.transport = self._epoch, Transport.Name(transport)
        if plan is not None:
            report.tensor_count, report.byte_count = len(plan.tensors), sum(b.byte_size for b in plan.buckets)
        for worker in workers:
            if worker.error is None:
                report.updated.append(worker.worker_id)
                continue
            log.warning("weights step=%d worker=%s: %s", self._step, worker.worker_id, worker.error)
            if transport == Transport.TRANSPORT_GRPC or isinstance(worker.error, DataLoss):
                report.lost[worker.worker_id] = str(worker.error)
                self._quarantine(worker)

    def _quarantine(self, worker: Receiver) -> None:
        request = router_pb2.DrainWorkerRequest(worker_id=worker.worker_id, quarantine=True, reason=str(worker.error))
        try:
            self._router.DrainWorker(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            log.warning("quarantine of %s: %s", worker.worker_id, from_rpc_error(error))


def _quarantined(worker: Receiver) -> bool:
    return worker.info.state == WorkerState.WORKER_STATE_QUARANTINED
