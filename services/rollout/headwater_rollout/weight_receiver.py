"""The receiving end of weight updates: stage while generating, swap between groups, verify, then serve."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import torch

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import Aborted, DataLoss, FailedPrecondition, InvalidArgument, duration
from headwater.rollout.v1 import rollout_pb2, weights_pb2
from headwater.rollout.v1.weights_pb2 import Transport, WeightPlan
from headwater.weights.fingerprint import fingerprint
from headwater.weights.group import WeightGroup, connect_store
from headwater.weights.plan import bucket_views, check_plan
from headwater_rollout.engine.base import Engine
from headwater_rollout.weight_binding import Views, bind, copy_into, spec_of_views

log = logging.getLogger(__name__)


@dataclass
class _Update:
    """One update in progress."""

    plan: WeightPlan
    rendezvous: weights_pb2.Rendezvous
    targets: list[Views]  # live views, in the order of plan.tensors
    staging: list[torch.Tensor]  # uint8 [byte_size] per bucket, on the engine's device
    joined: "asyncio.Future[WeightGroup] | None" = None
    received: set[int] = field(default_factory=set)


class WeightReceiver:
    """Receives weights into one engine. `version` changes only after the live tensors were read back and compared."""

    def __init__(self, engine: Engine, generation_lock: asyncio.Lock) -> None:
        """`generation_lock` is held while a group is generated; a commit takes it."""
        self._engine = engine
        self._generation_lock = generation_lock
        self._update: _Update | None = None
        self.version = WeightVersion()
        self.epoch = 0
        self.quarantined: str | None = None

    async def begin(self, request: weights_pb2.BeginWeightUpdateRequest) -> weights_pb2.BeginWeightUpdateResponse:
        """Check the plan against the live model, allocate staging, start to join. A running older update is dropped."""
        plan = request.plan
        if plan.epoch <= self.epoch:
            raise Aborted(
                f"epoch {plan.epoch} is not newer than {self.epoch}, which this worker has seen", field="epoch"
            )
        check_plan(plan)
        targets = bind(self._engine, plan)
        await self._drop_update(f"epoch {plan.epoch} begins")
        device = targets[0][0].device
        staging = [torch.empty(bucket.byte_size, dtype=torch.uint8, device=device) for bucket in plan.buckets]
        self.epoch = plan.epoch
        self._update = _Update(plan, request.rendezvous, targets, staging)
        if request.rendezvous.transport != Transport.TRANSPORT_GRPC:
            self._update.joined = asyncio.ensure_future(asyncio.to_thread(_join, request.rendezvous))
        return weights_pb2.BeginWeightUpdateResponse(epoch=plan.epoch, digest=plan.digest, bound_count=len(targets))

    async def receive(
        self, requests: AsyncIterator[weights_pb2.ReceiveWeightsRequest]
    ) -> weights_pb2.ReceiveWeightsResponse:
        """Receive one bucket: by broadcast, or from the chunks of this very stream with TRANSPORT_GRPC."""
        first = await anext(aiter(requests), None)
        if first is None:
            raise InvalidArgument("the stream ended before it named a bucket", field="bucket")
        update = self._running(first.epoch)
        if first.bucket >= len(update.staging):
            raise InvalidArgument(f"bucket {first.bucket} is not in the plan", field="bucket")
        buffer = update.staging[first.bucket]
        if update.joined is None:
            await _receive_chunks(first, requests, buffer)
        else:
            group = await asyncio.shield(update.joined)
            await asyncio.to_thread(group.broadcast, buffer)
        update.received.add(first.bucket)
        return weights_pb2.ReceiveWeightsResponse(epoch=first.epoch, received_count=len(update.received))

    async def commit(self, request: weights_pb2.CommitWeightUpdateRequest) -> weights_pb2.CommitWeightUpdateResponse:
        """Swap between groups, read the live tensors back, compare, and only then show the new version."""
        update = self._running(request.epoch)
        names = [tensor.name for tensor in update.plan.tensors]
        if len(update.received) != len(update.staging):
            raise FailedPrecondition(f"only {len(update.received)} of {len(update.staging)} buckets have arrived")
        if [item.name for item in request.expected] != names:
            raise InvalidArgument("expected must list the plan's tensors in order", field="expected")
        asked = time.monotonic()
        async with self._generation_lock:
            started = time.monotonic()
            self.quarantined = f"weights of epoch {request.epoch} are being written"
            live = await asyncio.to_thread(self._swap, update)
            self._verify(names, live, [item.value for item in request.expected])
            self.version, self.quarantined = update.plan.version, None
        await self._drop_update("committed")
        log.info("weights run=%s version=%d tensors=%d", self.version.run_id, self.version.step, len(names))
        return weights_pb2.CommitWeightUpdateResponse(
            version=self.version,
            bound_count=len(names),
            fingerprints=_fingerprint_messages(names, live),
            wait_time=duration(started - asked),
            commit_time=duration(time.monotonic() - started),
        )

    def _swap(self, update: _Update) -> list[int]:
        """Copy the staged tensors into the live model; returns the fingerprints of what is live then."""
        with torch.inference_mode():
            for index, buffer in enumerate(update.staging):
                first = update.plan.buckets[index].first_tensor
                for position, (_, staged) in enumerate(bucket_views(update.plan, index, buffer), start=first):
                    copy_into(update.targets[position], staged)
            self._engine.weights_changed()
            return [fingerprint(views) for views in update.targets]

    def _verify(self, names: Sequence[str], live: Sequence[int], expected: Sequence[int]) -> None:
        wrong = [name for name, have, want in zip(names, live, expected, strict=True) if have != want]
        if wrong:
            self.quarantined = f"{len(wrong)} of {len(names)} tensors differ from what was sent, first {wrong[0]}"
            log.error("quarantined: %s", self.quarantined)
            raise DataLoss(self.quarantined, field=wrong[0], reason="WEIGHTS_DIFFER")

    async def abort(self, request: weights_pb2.AbortWeightUpdateRequest) -> weights_pb2.AbortWeightUpdateResponse:
        """Drop the update of this epoch, if it is the running one."""
        if self._update is not None and self._update.plan.epoch == request.epoch:
            await self._drop_update(request.reason or "aborted by the sender")
        return weights_pb2.AbortWeightUpdateResponse(last_epoch=self.epoch)

    def get_weights(self, request: rollout_pb2.GetWeightsRequest) -> rollout_pb2.GetWeightsResponse:
        """Names, dtypes, shapes and fingerprints of live tensors."""
        views = self._engine.weight_views(request.component)
        names = list(request.names) or sorted(views)
        missing = [name for name in names if name not in views]
        if missing:
            raise InvalidArgument(f"{request.component} has no tensor {', '.join(missing[:5])}", field="names")
        tensors = [weights_pb2.WeightTensor(name=name, spec=spec_of_views(views[name])) for name in names]
        values = [] if request.specs_only else [fingerprint(views[name]) for name in names]
        return rollout_pb2.GetWeightsResponse(
            weight_version=self.version, tensors=tensors, fingerprints=_fingerprint_messages(names, values)
        )

    def _running(self, epoch: int) -> _Update:
        if self._update is None or self._update.plan.epoch != epoch:
            raise Aborted(f"no update of epoch {epoch} is running; the last epoch seen is {self.epoch}", field="epoch")
        return self._update

    async def _drop_update(self, reason: str) -> None:
        update, self._update = self._update, None
        if update is None:
            return
        log.debug("update of epoch %d ends: %s", update.plan.epoch, reason)
        if update.joined is not None:
            update.joined.add_done_callback(_leave)


def _leave(joined: "asyncio.Future[WeightGroup]") -> None:
    """Leave the group once it has formed; a group that never formed has ended with its own error."""
    if not joined.cancelled() and joined.exception() is None:
        joined.result().close()


def _join(rendezvous: weights_pb2.Rendezvous) -> WeightGroup:
    timeout_s = rendezvous.timeout.ToTimedelta().total_seconds()
    store = connect_store(rendezvous.host, rendezvous.port, timeout_s)
    return WeightGroup(
        rendezvous.transport,
        store,
        rank=rendezvous.first_rank,
        world_size=rendezvous.world_size,
        name=rendezvous.group_name,
        host=rendezvous.host,
        timeout_s=timeout_s,
    )


async def _receive_chunks(
    first: weights_pb2.ReceiveWeightsRequest,
    rest: AsyncIterator[weights_pb2.ReceiveWeightsRequest],
    buffer: torch.Tensor,
) -> None:
    position = 0
    message: weights_pb2.ReceiveWeightsRequest | None = first
    while message is not None:
        if (message.epoch, message.bucket) != (first.epoch, first.bucket):
            raise InvalidArgument("one stream carries one bucket of one epoch", field="bucket")
        end = position + len(message.chunk)
        if end > buffer.numel():
            raise InvalidArgument(f"more than the {buffer.numel()} bytes of the bucket arrived", field="chunk")
        if message.chunk:
            buffer[position:end].copy_(torch.frombuffer(bytearray(message.chunk), dtype=torch.uint8))
        position = end
        message = await anext(aiter(rest), None)
    if position != buffer.numel():
        raise DataLoss(f"the bucket ended after {position} of {buffer.numel()} bytes", field="chunk")


def _fingerprint_messages(names: Sequence[str], values: Sequence[int]) -> list[weights_pb2.TensorFingerprint]:
    return [weights_pb2.TensorFingerprint(name=name, value=value) for name, value in zip(names, values, strict=False)]
