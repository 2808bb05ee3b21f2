"""The life of one group: generate, score, filter, publish."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headwater.common.v1.sample_pb2 import FilterDecision, FilterVerdict, Media, Sample, SampleId, WeightVersion
from headwater.common.v1.sample_pb2 import ScoredGroup as ScoredGroupMessage
from headwater.errors import DeadlineExceeded, HeadwaterError, Unavailable, duration
from headwater.rollout.v1.rollout_pb2 import GenerateGroupRequest, GenerateGroupResponse, GroupOutcome
from headwater.sampling import ResolvedSampling
from headwater_rollout import filters, media, validation
from headwater_rollout.engine.base import Engine, GroupRequest, GroupResult
from headwater_rollout.publisher import GroupPublisher, check_finite
from headwater_rollout.reward_client import RewardClient
from headwater_rollout.reward_policy import GroupDropped, Scores, set_total
from headwater_rollout.status import WorkerStatus
from headwater_rollout.weight_receiver import WeightReceiver

log = logging.getLogger(__name__)

REDIS_CONDITION = "REDIS_UNAVAILABLE"


@dataclass(frozen=True)
class _Generated:
    """What came out of the engine."""

    result: GroupResult
    version: WeightVersion
    engine_s: float


@dataclass(frozen=True)
class _Scored:
    """A group with its rewards and the verdict."""

    samples: list[Sample]
    decision: FilterDecision
    scoring_s: float


class GroupPipeline:
    """Runs groups on one engine. Groups are generated one at a time; the next one is generated while one is scored."""

    def __init__(
        self,
        *,
        worker_id: str,
        engine: Engine,
        executor: ThreadPoolExecutor,
        generation_lock: asyncio.Lock,
        receiver: WeightReceiver,
        rewards: RewardClient,
        status: WorkerStatus,
        publisher: GroupPublisher | None,
        max_group_size: int,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._executor = executor
        self._lock = generation_lock
        self._receiver = receiver
        self._rewards = rewards
        self._status = status
        self._publisher = publisher
        self._max_group_size = max_group_size

    async def run(self, request: GenerateGroupRequest, timeout_s: float) -> AsyncIterator[GenerateGroupResponse]:
        """Yield the samples and then the outcome. See RolloutService.GenerateGroup for the errors."""
        self._status.check_admission()
        with self._status.group():
            started = time.monotonic()
            # Ends a little before the caller's own deadline, so that the caller learns what was waited for.
            deadline = started + timeout_s - min(1.0, 0.05 * timeout_s)
            try:
                sampling = self._check(request)
                await self._check_services(request, deadline)
                generated = await self._generate(request, sampling, deadline)
                generation_s = time.monotonic() - started
                scored = await self._score(request, generated, deadline)
                published = await self._publish(request, generated, scored)
            except HeadwaterError as error:
                log.warning(
                    "group failed worker=%s group=%s %s: %s", self._worker_id, request.group_id, error.reason, error
                )
                raise
            self._account(request, generated, scored, published, time.monotonic() - started)
            for sample in scored.samples:
                if not request.return_media:
                    sample.ClearField("media")
                yield GenerateGroupResponse(sample=sample)
            yield GenerateGroupResponse(
                outcome=GroupOutcome(
                    group_id=request.group_id,
                    filter_decision=scored.decision,
                    published=published,
                    weight_version=generated.version,
                    worker_id=self._worker_id,
                    generation_time=duration(generation_s),
                    scoring_time=duration(scored.scoring_s),
                )
            )

    def _check(self, request: GenerateGroupRequest) -> ResolvedSampling:
        sampling = validation.check_request(
            request,
            max_group_size=self._max_group_size,
            size_multiple_px=self._engine.info.size_multiple_px,
            can_publish=self._publisher is not None,
        )
        self._check_version(request)
        return sampling

    def _check_version(self, request: GenerateGroupRequest) -> None:
        if request.HasField("min_weight_version"):
            validation.check_freshness(request.min_weight_version, self._receiver.version)

    async def _check_services(self, request: GenerateGroupRequest, deadline: float) -> None:
        """Find out before generating that rewards and Redis can be reached."""
        await self._rewards.check(request.rewards, deadline)
        if self._publisher is not None and validation.publishes(request):
            try:
                await self._publisher.stream.ping()
            except Unavailable as error:
                self._status.raise_condition(REDIS_CONDITION, error.message)
                raise
            self._status.clear_condition(REDIS_CONDITION)

    async def _generate(self, request: GenerateGroupRequest, sampling: ResolvedSampling, deadline: float) -> _Generated:
        engine_request = GroupRequest(
            prompt=request.prompt,
            seeds=tuple(request.seeds),
            sampling=sampling,
            record_trajectory=validation.publishes(request),
        )
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._lock.acquire()
                version = WeightVersion()
                version.CopyFrom(self._receiver.version)
                generating = self._start_engine(request, engine_request)
                started = time.monotonic()
                result = await asyncio.shield(generating)
        except TimeoutError:
            raise DeadlineExceeded(
                f"group {request.group_id} was not generated in time; allow more time, use fewer steps or samples, or "
                "add workers",
                reason="GENERATION_DEADLINE",
            ) from None
        check_finite(result)
        return _Generated(result, version, time.monotonic() - started)

    def _start_engine(
        self, request: GenerateGroupRequest, engine_request: GroupRequest
    ) -> "asyncio.Future[GroupResult]":
        """Start the engine; the lock, held already, is released when the engine has ended.

        An engine cannot be interrupted: when the caller leaves, it goes on, and weights must not change meanwhile.
        """
        try:
            self._status.check_engine()
            self._check_version(request)
            future = asyncio.get_running_loop().run_in_executor(self._executor, self._engine.generate, engine_request)
        except BaseException:
            self._lock.release()
            raise

        def ended(done: "asyncio.Future[GroupResult]") -> None:
            self._lock.release()
            if not done.cancelled():
                done.exception()  # retrieved: the caller may be gone

        future.add_done_callback(ended)
        return future

    async def _score(self, request: GenerateGroupRequest, generated: _Generated, deadline: float) -> _Scored:
        started = time.monotonic()
        encoded = await asyncio.to_thread(_encode, generated.result)
        by_reward: list[Scores] = []
        dropped: FilterDecision | None = None
        try:
            by_reward = await self._rewards.score(
                group_id=request.group_id,
                prompt=request.prompt,
                metadata=request.metadata,
                media=encoded,
                specs=request.rewards,
                deadline=deadline,
            )
        except GroupDropped as error:
            dropped = FilterDecision(
                verdict=FilterVerdict.FILTER_VERDICT_DROPPED, filter=f"reward:{error.reward}", detail=str(error)
            )
        scoring_s = time.monotonic() - started
        samples = []
        for index, item in enumerate(encoded):
            sample = _sample(request, generated, index, item, scoring_s)
            sample.rewards.extend(scores[index] for scores in by_reward)
            set_total(sample, request.rewards)
            samples.append(sample)
        return _Scored(samples, dropped or filters.decide(request.filters, samples), scoring_s)

    async def _publish(self, request: GenerateGroupRequest, generated: _Generated, scored: _Scored) -> bool:
        """Publish a kept group. Whether the group is in the stream, by this attempt or an earlier one."""
        if self._publisher is None or not validation.publishes(request):
            return False
        if scored.decision.verdict != FilterVerdict.FILTER_VERDICT_KEPT:
            return await self._publisher.stream.is_published(request.run_id, request.group_id)
        group = ScoredGroupMessage(
            run_id=request.run_id,
            group_id=request.group_id,
            prompt=request.prompt,
            metadata=request.metadata,
            sampling=request.sampling,
            reward_specs=request.rewards,
            samples=scored.samples,
            filter_decision=scored.decision,
            worker_id=self._worker_id,
        )
        group.created_at.GetCurrentTime()
        if not await self._publisher.publish(group, generated.result):
            log.info("group %s was published by an earlier attempt", request.group_id)
        return True

    def _account(
        self, request: GenerateGroupRequest, generated: _Generated, scored: _Scored, published: bool, seconds: float
    ) -> None:
        totals = [sample.total_reward for sample in scored.samples if sample.HasField("total_reward")]
        self._status.samples += len(scored.samples)
        self._status.published_groups += published
        self._status.engine_s += generated.engine_s
        self._status.scoring_s += scored.scoring_s
        self._status.reward_mean = sum(totals) / len(totals) if totals else None
        log.info(
            "group worker=%s group=%s n=%d run=%s version=%d reward=%s verdict=%s published=%s engine_s=%.2f "
            "scoring_s=%.2f total_s=%.2f",
            self._worker_id,
            request.group_id,
            len(scored.samples),
            generated.version.run_id or "-",
            generated.version.step,
            f"{sum(totals) / len(totals):.4f}" if totals else "-",
            scored.decision.filter or "kept",
            published,
            generated.engine_s,
            scored.scoring_s,
            seconds,
        )


def _encode(result: GroupResult) -> list[Media]:
    return [media.encode(frames) for frames in result.media]


def _sample(
    request: GenerateGroupRequest, generated: _Generated, index: int, encoded: Media, scoring_s: float
) -> Sample:
    return Sample(
        id=SampleId(run_id=request.run_id, group_id=request.group_id, index=index),
        seed=request.seeds[index],
        first_step_version=generated.version,
        last_step_version=generated.version,
        media=encoded,
        generation_time=duration(generated.engine_s),
        scoring_time=duration(scoring_s),
    )
