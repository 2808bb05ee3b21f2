"""One attempt: a GenerateGroup call on one worker, whose samples are handed on only when the group is complete."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from headwater.common.v1.sample_pb2 import Sample
from headwater.errors import HeadwaterError, Unavailable
from headwater.rollout.v1.rollout_pb2 import GenerateGroupRequest, GroupOutcome
from headwater.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from headwater.rpc.channel import WORKER_NAME, aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater_router.registry import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """A finished group: its samples by index, and its outcome. All of them come from the same attempt."""

    samples: list[Sample]
    outcome: GroupOutcome


class Attempts:
    """Calls workers, over one channel per registration."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def generate(self, worker: Worker, request: GenerateGroupRequest, timeout_s: float) -> Group:
        """Run one group on one worker. Raises what the worker raised, and `Unavailable` when it is lost meanwhile.

        Nothing is relayed before the outcome: a worker emits its samples when the group is scored, so this costs no
        time, and a group that is repeated elsewhere can never mix the samples or weights of two attempts.
        """
        reading = asyncio.ensure_future(self._read(worker, request, timeout_s))
        lost = asyncio.ensure_future(worker.lost.wait())
        try:
            await asyncio.wait({reading, lost}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not reading.cancelled():
                return reading.result()
            raise Unavailable(f"worker {worker.worker_id} was lost while it made the group", reason="WORKER_LOST")
        finally:
            for task in (reading, lost):
                task.cancel()
            await asyncio.gather(reading, lost, return_exceptions=True)

    async def _read(self, worker: Worker, request: GenerateGroupRequest, timeout_s: float) -> Group:
        samples: dict[int, Sample] = {}
        call = RolloutServiceStub(self._channel(worker)).GenerateGroup(request, timeout=timeout_s)
        try:
            async for response in call:
                if response.HasField("outcome"):
                    return _complete(worker, request, samples, response.outcome)
                samples[response.sample.id.index] = response.sample
        except grpc.aio.AioRpcError as error:
            raise _with_worker(from_rpc_error(error), worker) from error
        finally:
            call.cancel()
        raise Unavailable(f"worker {worker.worker_id} ended the group without an outcome", reason="OUTCOME_MISSING")

    def _channel(self, worker: Worker) -> grpc.aio.Channel:
        if worker.lease_id not in self._channels:
            address = worker.registration.address
            self._channels[worker.lease_id] = aio_channel(address, server_name=WORKER_NAME)
        return self._channels[worker.lease_id]

    def forget(self, worker: Worker) -> None:
        """Close the channel of a registration that has ended."""
        channel = self._channels.pop(worker.lease_id, None)
        if channel is not None:
            self._in_background(channel.close(None))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close(None) for channel in channels), *self._closing)


def _complete(
    worker: Worker, request: GenerateGroupRequest, samples: dict[int, Sample], outcome: GroupOutcome
) -> Group:
    if sorted(samples) != list(range(len(request.seeds))):
        raise Unavailable(
            f"worker {worker.worker_id} sent samples {sorted(samples)} of a group of {len(request.seeds)}",
            reason="GROUP_INCOMPLETE",
        )
    return Group([samples[index] for index in sorted(samples)], outcome)


def reworded(error: HeadwaterError, message: str, *, field: str | None = None) -> HeadwaterError:
    """The same error with another message, and another field if given."""
    return type(error)(
        message,
        reason=error.reason,
        field=error.field if field is None else field,
        retry_after_s=error.retry_after_s,
    )


def _with_worker(error: HeadwaterError, worker: Worker) -> HeadwaterError:
    """The worker's error as the client reads it: fields of GenerateGroupRequest become fields of its Prompt."""
    field = error.field and ("prompt.text" if error.field == "prompt" else f"prompt.{error.field}")
    return reworded(error, f"worker {worker.worker_id}: {error.message}", field=field)
