"""Feeds the router with prompts, as a client like any other: within a budget, until the run has its groups.

Everything here runs in the background loop, apart from the methods that say so. A group is charged from its submission
until `release`; a group that the filters dropped is replaced by one with the next number; a group that failed is
submitted again under the same id, which the stream makes harmless.
"""

import asyncio
import heapq
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from headwater.common.v1.sample_pb2 import FilterVerdict, WeightVersion
from headwater.common.v1.sampling_pb2 import SamplingParams, StepList
from headwater.config.recipe import Recipe
from headwater.errors import HeadwaterError, Internal, from_item_error
from headwater.rollout.v1.rollout_pb2 import GroupOutcome, PublishMode
from headwater.router.v1 import router_pb2, router_pb2_grpc
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater.sampling import resolve
from headwater_trainer.prompt_order import PromptOrder, group_id_of, sequence_of
from headwater_trainer.worker_watch import Conditions, watch_workers

if TYPE_CHECKING:  # exists in the type stubs only
    from headwater.router.v1.router_pb2_grpc import RouterServiceAsyncStub

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0
_MAX_BACKOFF_S = 10.0
_MANY_DROPS = 5  # batches of dropped groups without a kept one before a person is told
_MAX_ATTEMPTS = 10  # of a group that fails for reasons that are nobody's absence
_PATIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ALREADY_EXISTS,
)
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_LIMITED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


@dataclass(frozen=True)
class Standing:
    """Where the feeding stands; replaced as a whole, so that any thread may read it."""

    next_sequence: int = 0
    in_flight: frozenset[int] = frozenset()  # submitted, no outcome yet
    published: frozenset[int] = frozenset()  # in the stream, not released yet
    dropped_total: int = 0

    @property
    def charged(self) -> frozenset[int]:
        """All groups that hold a slot."""
        return self.in_flight | self.published


class Feeder:
    """Keeps the router supplied with the groups of one run."""

    def __init__(
        self,
        router: str,
        run_id: str,
        recipe: Recipe,
        order: PromptOrder,
        notice: Callable[[str, str], None],
        *,
        steps: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        """`notice(reason, message)` is called from the background loop; `steps(round, seed)` gives stochastic steps."""
        self._steps = steps
        self._router = router
        self._run_id = run_id
        self._recipe = recipe
        self._order = order
        self._notice = notice
        self._capacity = (recipe.train.staleness_bound + 1) * recipe.train.groups_per_step
        self._rewards = [reward.to_proto() for reward in recipe.rewards]
        self._step = 0
        self._next = 0
        self._in_flight: set[int] = set()
        self._published: set[int] = set()
        self._queue: list[int] = []  # of those in flight: to be submitted now
        self._attempts: defaultdict[int, int] = defaultdict(int)
        self._dropped_total = self._drops_in_a_row = 0
        self._wake = asyncio.Event()
        self._conditions = Conditions(notice)
        self._stub: RouterServiceAsyncStub | None = None
        self._task: asyncio.Task[None] | None = None
        self.standing = Standing()
        self.failure: HeadwaterError | None = None  # why the run cannot go on; readable by any thread

    def resume(self, step: int, next_sequence: int, outstanding: Collection[int], in_stream: Collection[int]) -> None:
        """Set where a run stands, before `start`: groups in the stream are not submitted again, other outstanding are.

        Groups that were submitted after the cursor was written are known by the larger numbers in the stream.
        """
        self._step = step
        self._published = set(in_stream)
        self._next = max([next_sequence, *(number + 1 for number in in_stream)])
        self._in_flight = {*outstanding, *range(next_sequence, self._next)} - self._published
        self._tell()

    async def start(self) -> None:
        """Begin to feed."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End feeding: groups in flight are cancelled, the budget is removed. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """A broken connection is made again, with backoff; its groups are submitted again."""
        async with aio_channel(self._router) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            watching = asyncio.create_task(watch_workers(stub, self._conditions))
            delay = 0.2
            try:
                while self.failure is None:
                    try:
                        await self._session(stub)
                        delay = 0.2
                    except grpc.aio.AioRpcError as error:
                        if error.code() in _REFUSED:
                            raise from_rpc_error(error) from error
                        self._conditions.begin("ROUTER_UNAVAILABLE", f"the router at {self._router}: {error.details()}")
                        delay = min(_MAX_BACKOFF_S, delay * 2)
                    await asyncio.sleep(delay)
            except HeadwaterError as error:
                self.failure = error
            except Exception as error:  # the training thread must hear of it
                log.exception("the feeder failed")
                self.failure = Internal(f"the feeder failed: {type(error).__name__}: {error}")
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await self._remove_budget(stub)

    async def release(self, group_ids: Sequence[str], step: int) -> None:
        """Free the slots of groups that were trained or given up; `step` steps are done now."""
        self._step = step
        numbers = {sequence_of(group_id) for group_id in group_ids}
        self._published -= numbers
        self._in_flight -= numbers
        self._tell()
        await self._free(group_ids)
        self._wake.set()

    async def _session(self, stub: "RouterServiceAsyncStub") -> None:
        """One stream of prompts; ends with an error when it breaks."""
        self._stub = stub
        charged = [group_id_of(number) for number in sorted(self._in_flight | self._published)]
        await stub.SetBudget(
            router_pb2.SetBudgetRequest(run_id=self._run_id, capacity_groups=self._capacity, charged_group_ids=charged),
            timeout=_CALL_TIMEOUT_S,
        )
        self._conditions.end("ROUTER_UNAVAILABLE")
        self._queue = sorted(self._in_flight)
        call = stub.SubmitPrompts()  # type: ignore[call-arg]  # the stubs want an iterator; write() works as well
        reading = asyncio.create_task(self._read(call))
        try:
            while not reading.done():
                self._top_up()
                while self._queue:
                    await call.write(router_pb2.SubmitPromptsRequest(prompt=self._prompt(heapq.heappop(self._queue))))
                self._wake.clear()
                waking = asyncio.create_task(self._wake.wait())
                await asyncio.wait((reading, waking), return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
            await reading
        except asyncio.InvalidStateError:  # written to a stream that has just ended: its status says why
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        async for response in call:
            number = sequence_of(response.request_id.partition(".")[0])
            kind = response.WhichOneof("event")
            if kind == "outcome":
                await self._finished(number, response.outcome)
            elif kind == "error":
                self._failed(number, from_item_error(response.error))

    async def _finished(self, number: int, outcome: GroupOutcome) -> None:
        if number not in self._in_flight:
            return
        self._attempts.pop(number, None)
        if outcome.filter_decision.verdict == FilterVerdict.FILTER_VERDICT_DROPPED:
            await self._dropped(number, outcome.filter_decision.detail or outcome.filter_decision.filter)
        elif outcome.published:
            self._drops_in_a_row = 0
            self._in_flight.discard(number)
            self._published.add(number)
        else:
            self._failed(number, Internal("the worker kept the group but did not publish it"))
        self._tell()

    async def _dropped(self, number: int, why: str) -> None:
        self._in_flight.discard(number)
        self._dropped_total += 1
        self._drops_in_a_row += 1
        if self._drops_in_a_row == _MANY_DROPS * self._recipe.train.groups_per_step:
            self._notice(
                "GROUPS_DROPPED",
                f"the last {self._drops_in_a_row} groups were all dropped ({why}); no step can be made of them. "
                "Raise sampling.noise_level or train.group_size, or choose prompts whose reward varies",
            )
        await self._free([group_id_of(number)])
        self._wake.set()

    def _failed(self, number: int, error: HeadwaterError) -> None:
        """Submit the group again later, or end the run when that cannot help."""
        if number not in self._in_flight:
            return
        self._attempts[number] += 1
        attempts = self._attempts[number]
        patient = error.code in _PATIENT or error.reason == "BUDGET_REMOVED"
        if not patient and (error.code not in _LIMITED or attempts >= _MAX_ATTEMPTS):
            self.failure = error
            self._wake.set()
            return
        delay = min(_MAX_BACKOFF_S, max(error.retry_after_s or 0.0, 0.2 * 2 ** min(attempts, 8)))
        log.info("group %s again in %.1f s: %s", group_id_of(number), delay, error.message)
        if attempts == 3:
            self._notice("GROUP_RETRIED", f"group {group_id_of(number)} has failed {attempts} times: {error.message}")
        asyncio.get_running_loop().call_later(delay, self._again, number)

    def _again(self, number: int) -> None:
        if number in self._in_flight and number not in self._queue:
            heapq.heappush(self._queue, number)
            self._wake.set()

    def _top_up(self) -> None:
        """Take new numbers while there is room, and no more than the run still needs."""
        train = self._recipe.train
        needed = (train.steps - self._step) * train.groups_per_step
        while len(self._in_flight) + len(self._published) < min(self._capacity, needed):
            self._in_flight.add(self._next)
            heapq.heappush(self._queue, self._next)
            self._next += 1
        self._tell()
        if self.failure is not None:
            raise self.failure

    def _prompt(self, number: int) -> router_pb2.Prompt:
        item = self._order.prompt(number)
        # A group submitted now is trained at most staleness_bound steps after the present one.
        oldest = WeightVersion(run_id=self._run_id, step=self._step)
        return router_pb2.Prompt(
            request_id=f"{group_id_of(number)}.{uuid.uuid4().hex[:8]}.{self._run_id}",
            run_id=self._run_id,
            group_id=group_id_of(number),
            text=item.text,
            metadata=ParseDict(dict(item.metadata), Struct()),
            seeds=self._order.seeds(number, self._recipe.train.group_size),
            sampling=self._sampling(number // self._recipe.train.groups_per_step),
            rewards=self._rewards,
            filters=self._recipe.filters,
            publish=PublishMode.PUBLISH_MODE_STREAM,
            min_weight_version=oldest,
        )

    def _sampling(self, round_number: int) -> SamplingParams:
        params = self._recipe.rollout_sampling(round_number)
        if self._steps is not None:
            steps = [int(step) for step in self._steps(round_number, self._recipe.run.seed)]
            params.transition.explicit_steps.CopyFrom(StepList(steps=steps))
            resolve(params, group_seed=0)  # refuses steps that cannot be
        return params

    async def _free(self, group_ids: Sequence[str]) -> None:
        if self._stub is None:
            return
        request = router_pb2.ReleaseGroupsRequest(run_id=self._run_id, group_ids=group_ids)
        try:
            await self._stub.ReleaseGroups(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:  # the next session's SetBudget states what is charged
            log.info("slots are not freed now: %s", error)

    async def _remove_budget(self, stub: "RouterServiceAsyncStub") -> None:
        request = router_pb2.SetBudgetRequest(run_id=self._run_id, capacity_groups=0)
        try:
            await asyncio.shield(stub.SetBudget(request, timeout=2.0))
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            log.info("the budget of %s was not removed: no answer from the router", self._run_id)

    def _tell(self) -> None:
        self.standing = Standing(
            self._next, frozenset(self._in_flight), frozenset(self._published), self._dropped_total
        )
