"""One epoch of a weight update: plan, begin, buckets, commit, towards a fixed set of workers over one transport."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.common.v1.tensor_pb2 import TensorSpec
from headwater.errors import DataLoss, HeadwaterError, Unavailable, duration
from headwater.rollout.v1 import rollout_pb2_grpc, weights_pb2
from headwater.rollout.v1.rollout_pb2 import GetWeightsRequest, GetWorkerInfoResponse
from headwater.rollout.v1.weights_pb2 import Transport, WeightPlan
from headwater.router.v1 import router_pb2
from headwater.rpc.channel import WORKER_NAME, sync_channel
from headwater.rpc.errors import from_rpc_error
from headwater.weights.fingerprint import fingerprint
from headwater.weights.group import WeightGroup, serve_store
from headwater.weights.plan import bucket_views, build_plan, spec_of, torch_dtype

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20


@dataclass
class Receiver:
    """One worker, with its channel open for the time of an update, and why it failed, if it did."""

    worker_id: str
    info: GetWorkerInfoResponse
    channel: grpc.Channel
    stub: rollout_pb2_grpc.RolloutServiceStub
    error: HeadwaterError | None = None


def open_receiver(worker: router_pb2.WorkerStatus) -> Receiver:
    """Open a channel to a worker; the caller closes it."""
    channel = sync_channel(worker.address, server_name=WORKER_NAME)
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)
    return Receiver(worker.worker_id, worker.info, channel, stub)


def call_all(workers: Sequence[Receiver], start: Callable[[Receiver], grpc.Future]) -> dict[str, Any]:
    """Call every worker that has not failed, in parallel; replies by worker id. Failures go to `worker.error`."""
    calls = [(worker, start(worker)) for worker in workers if worker.error is None]
    replies = {}
    for worker, call in calls:
        try:
            replies[worker.worker_id] = call.result()
        except grpc.RpcError as error:
            worker.error = from_rpc_error(error)
    return replies


def group_transport(workers: Sequence[Receiver]) -> "Transport.ValueType":
    """NCCL when every end has a GPU, else gloo."""
    on_gpu = torch.cuda.is_available() and all(worker.info.device.startswith("cuda") for worker in workers)
    return Transport.TRANSPORT_NCCL if on_gpu else Transport.TRANSPORT_GLOO


class WeightEpoch:
    """Sends one plan to `workers`. Afterwards `worker.error` is None for exactly those that serve the new version."""

    def __init__(
        self, epoch: int, version: WeightVersion, component: str, workers: list[Receiver],
        transport: "Transport.ValueType", *, host: str, timeout_s: float, bucket_bytes: int,
    ) -> None:  # fmt: skip
        """`timeout_s` bounds each control call, the rendezvous and each broadcast."""
        self._epoch, self._version, self._component = epoch, version, component
        self._workers, self._transport = workers, transport
        self._host, self._timeout_s, self._bucket_bytes = host, timeout_s, bucket_bytes
        self._grouped = transport != Transport.TRANSPORT_GRPC

    def run(self, tensors: Mapping[str, torch.Tensor]) -> WeightPlan | None:
        """Send `tensors` (diffusers name → value); returns the plan, or None when no worker could be asked."""
        for worker in self._workers:
            worker.error = None
        plan = self._plan(tensors)
        if plan is None:
            return None
        expected = self._transfer(plan, tensors)
        if expected is not None:
            self._commit(plan, expected)
        for worker in self._workers:
            if worker.error is not None:
                self._abort(worker)
        return plan

    def _plan(self, tensors: Mapping[str, torch.Tensor]) -> WeightPlan | None:
        """A plan in the dtypes that the first worker to answer holds; the others check it at Begin."""
        request = GetWeightsRequest(component=self._component, specs_only=True)
        replies = call_all(
            self._workers, lambda worker: worker.stub.GetWeights.future(request, timeout=self._timeout_s)
        )
        if not replies:
            return None
        held = {tensor.name: tensor.spec.dtype for tensor in next(iter(replies.values())).tensors}
        specs = [
            (name, TensorSpec(dtype=held[name], shape=list(tensor.shape)) if name in held else spec_of(tensor))
            for name, tensor in tensors.items()
        ]
        return build_plan(
            specs,
            epoch=self._epoch,
            version=self._version,
            component=self._component,
            bucket_bytes=self._bucket_bytes,
        )

    def _transfer(
        self, plan: WeightPlan, tensors: Mapping[str, torch.Tensor]
    ) -> list[weights_pb2.TensorFingerprint] | None:
        """Begin and send all buckets; the fingerprints of what was sent, in the plan's order, or None on failure."""
        store = serve_store(self._host, self._timeout_s) if self._grouped else None
        rendezvous = weights_pb2.Rendezvous(
            transport=self._transport,
            host=self._host,
            port=store.port if store else 0,
            world_size=1 + sum(_ranks(worker) for worker in self._workers if worker.error is None),
            group_name=f"headwater-{plan.epoch}",
            timeout=duration(self._timeout_s),
        )
        self._begin(plan, rendezvous)
        if all(worker.error for worker in self._workers):
            return None
        group = None
        try:
            if store is not None:
                group = WeightGroup(
                    self._transport, store, rank=0, world_size=rendezvous.world_size, name=rendezvous.group_name,
                    host=self._host, timeout_s=self._timeout_s,
                )  # fmt: skip
            return [
                item for index in range(len(plan.buckets)) for item in self._send_bucket(plan, index, tensors, group)
            ]
        except Unavailable as error:
            self._fail_all(error)
            return None
        finally:
            if group is not None:
                group.close()

    def _begin(self, plan: WeightPlan, rendezvous: weights_pb2.Rendezvous) -> None:
        reached = [worker for worker in self._workers if worker.error is None]
        requests, rank = {}, 1
        for worker in reached:
            request = weights_pb2.BeginWeightUpdateRequest(plan=plan, rendezvous=rendezvous)
            request.rendezvous.first_rank = rank
            rank += _ranks(worker)
            requests[worker.worker_id] = request
        call_all(
            self._workers,
            lambda worker: worker.stub.BeginWeightUpdate.future(requests[worker.worker_id], timeout=self._timeout_s),
        )
        refused = next((worker for worker in reached if worker.error), None)
        if self._grouped and refused is not None:  # the group would wait for it: nobody joins, all try without a group
            self._fail_all(Unavailable(f"no group was formed: {refused.worker_id} refused: {refused.error}"))

    def _send_bucket(
        self, plan: WeightPlan, index: int, tensors: Mapping[str, torch.Tensor], group: WeightGroup | None
    ) -> list[weights_pb2.TensorFingerprint]:
        """Send one bucket and return the fingerprints of its tensors."""
        buffer = _pack(plan, index, tensors, on_host=self._transport != Transport.TRANSPORT_NCCL)

        def start(worker: Receiver) -> grpc.Future:
            chunks = _chunks(plan.epoch, index, buffer if group is None else None)
            return worker.stub.ReceiveWeights.future(chunks, timeout=self._timeout_s)

        if group is None:
            call_all(self._workers, start)
        else:
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(group.broadcast, buffer)
                call_all(self._workers, start)
                sending.result()
        return [
            weights_pb2.TensorFingerprint(name=name, value=fingerprint(view))
            for name, view in bucket_views(plan, index, buffer)
        ]

    def _commit(self, plan: WeightPlan, expected: Sequence[weights_pb2.TensorFingerprint]) -> None:
        request = weights_pb2.CommitWeightUpdateRequest(epoch=plan.epoch, expected=expected)
        # A worker finishes the group it is generating before it swaps: that may take longer than a control call.
        patience_s = 20 * self._timeout_s
        replies = call_all(
            self._workers, lambda worker: worker.stub.CommitWeightUpdate.future(request, timeout=patience_s)
        )
        wanted = [(item.name, item.value) for item in expected]
        for worker in self._workers:
            reply = replies.get(worker.worker_id)
            if reply and [(item.name, item.value) for item in reply.fingerprints] != wanted:
                worker.error = DataLoss(f"{worker.worker_id} answered with other fingerprints", reason="WEIGHTS_DIFFER")

    def _abort(self, worker: Receiver) -> None:
        request = weights_pb2.AbortWeightUpdateRequest(epoch=self._epoch, reason=str(worker.error))
        try:
            worker.stub.AbortWeightUpdate(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            log.debug("abort at %s: %s", worker.worker_id, from_rpc_error(error))

    def _fail_all(self, error: HeadwaterError) -> None:
        for worker in self._workers:
            worker.error = worker.error or error


def _ranks(worker: Receiver) -> int:
    """Engine ranks that join the group."""
    return max(1, worker.info.engine_rank_count)


def _chunks(epoch: int, bucket: int, buffer: torch.Tensor | None) -> Iterator[weights_pb2.ReceiveWeightsRequest]:
    """The request stream of one bucket: with its bytes, or without when they travel by broadcast."""
    if buffer is None:
        yield weights_pb2.ReceiveWeightsRequest(epoch=epoch, bucket=bucket)
        return
    for part in buffer.split(_CHUNK_BYTES):
        yield weights_pb2.ReceiveWeightsRequest(epoch=epoch, bucket=bucket, chunk=part.numpy().tobytes())


def _pack(plan: WeightPlan, index: int, tensors: Mapping[str, torch.Tensor], *, on_host: bool) -> torch.Tensor:
    """The flat buffer of one bucket, uint8 [byte_size], in the plan's dtypes; on the host or on the tensors' device."""
    bucket = plan.buckets[index]
    entries = plan.tensors[bucket.first_tensor : bucket.first_tensor + bucket.tensor_count]
    device = torch.device("cpu") if on_host else tensors[entries[0].name].device
    buffer = torch.zeros(bucket.byte_size, dtype=torch.uint8, device=device)
    for entry, (name, view) in zip(entries, bucket_views(plan, index, buffer), strict=True):
        view.copy_(tensors[name].to(torch_dtype(entry.spec)))
    return buffer
