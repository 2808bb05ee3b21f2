"""RewardService: checks requests, hands items to the queue of each reward, and puts the answers together."""

import asyncio
import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc.aio
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from headwater.common.v1.reward_pb2 import RewardScore
from headwater.errors import DeadlineExceeded, HeadwaterError, InvalidArgument, NotFound, duration, to_item_error
from headwater.reward.v1 import reward_pb2 as pb
from headwater.reward.v1 import reward_pb2_grpc
from headwater.telemetry.metrics import Figure
from headwater.tensors.blobs import BlobStore
from headwater_reward import checks, media
from headwater_reward.batching import Outcome, PendingItem, RewardQueue, is_group_wise
from headwater_reward.config import RewardConfig
from headwater_reward.registry import Reward, Score, parse_params
from headwater_reward.settings import RewardSettings
from headwater_reward.validation import suggestion

log = logging.getLogger(__name__)
MAX_PROMPT_CHARS = 16_384


class RewardService(reward_pb2_grpc.RewardServiceServicer):
    """Hosts some rewards, each with its own queue and thread."""

    def __init__(
        self, rewards: Sequence[Reward], config: RewardConfig, settings: Mapping[str, RewardSettings] | None = None
    ) -> None:
        self._config = config
        self._checks: dict[str, pb.RewardCheck] = {}
        self._blobs = BlobStore(config.blob_root) if config.blob_root else None
        self._queues: Mapping[str, RewardQueue] = {
            reward.name: _queue_for(reward, config, (settings or {}).get(reward.name, RewardSettings(reward.name)))
            for reward in sorted(rewards, key=lambda reward: reward.name)
        }

    async def load(self) -> None:
        """Load every reward, all at once; raises what the first failing one raised."""
        started = time.monotonic()
        ready = [asyncio.wrap_future(queue.start()) for queue in self._queues.values()]
        await asyncio.gather(*ready)
        log.info("loaded rewards=%s seconds=%.1f", ",".join(self._queues), time.monotonic() - started)

    async def check(self) -> None:
        """Score the golden images of every reward; ListRewards tells the outcome, and no run uses one that failed."""
        results = await self._check(list(self._queues.values()), time.monotonic() + self._config.default_timeout_s)
        log.info("checked rewards=%s", ",".join(result.name for result in results if result.passed) or "none passed")

    async def _check(self, queues: Sequence[RewardQueue], deadline: float) -> list[pb.RewardCheck]:
        results = await asyncio.gather(*(checks.check(queue, deadline=deadline) for queue in queues))
        for result in results:
            self._checks[result.name] = result
            if not result.passed:
                log.error("golden images failed reward=%s: %s", result.name, result.detail)
        return results

    async def drain(self) -> None:
        """Refuse new items and score the waiting ones, for at most the grace of the configuration."""
        closing = [asyncio.to_thread(q.close, self._config.drain_grace_s) for q in self._queues.values()]
        for name, ended in zip(self._queues, await asyncio.gather(*closing), strict=True):
            if not ended:
                log.warning("reward still busy at the end of the drain, its items are lost reward=%s", name)

    def figures(self) -> Iterator[Figure]:
        """Queue and work of each reward, for Prometheus."""
        for name, queue in self._queues.items():
            own = {"reward": name}
            yield Figure("headwater_reward_waiting_items", "Items that wait for a reward", queue.waiting, own)
            yield Figure("headwater_reward_oldest_wait_seconds", "Wait of the item in front", queue.oldest_wait_s, own)
            yield Figure(
                "headwater_reward_wait_seconds_total", "Seconds that scored items had waited", queue.waited_s, own
            )
            yield Figure("headwater_reward_scored_items_total", "Items scored since start", queue.scored_items, own)
            yield Figure("headwater_reward_failed_items_total", "Items that got an error", queue.failed_items, own)
            yield Figure("headwater_reward_scoring_seconds_total", "Seconds spent scoring", queue.scoring_s, own)

    async def ListRewards(
        self, request: pb.ListRewardsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRewardsResponse:
        """The rewards of this server and their parameters."""
        return pb.ListRewardsResponse(
            rewards=[_info(q.reward, self._checks.get(name)) for name, q in self._queues.items()]
        )

    async def ScoreGroup(
        self, request: pb.ScoreGroupRequest, context: grpc.aio.ServicerContext
    ) -> pb.ScoreGroupResponse:
        """Score every medium with every reward asked for; what fails, fails alone."""
        jobs = self._jobs(request)
        for queue, items in jobs:  # all or nothing: no await lies between this check and the last submit
            queue.check_room(len(items))
        timeout_s = self._timeout_s(context)
        deadline = time.monotonic() + timeout_s
        pending = [
            asyncio.wrap_future(future) for queue, items in jobs for future in queue.submit(items, deadline=deadline)
        ]
        try:
            async with asyncio.timeout(timeout_s):
                outcomes: list[Outcome] = await asyncio.gather(*pending)  # its cancellation withdraws the items
        except TimeoutError:
            raise DeadlineExceeded(
                f"scoring {len(request.media)} media took longer than {timeout_s:.1f} s; allow more time, send "
                "smaller groups or add reward servers",
                reason="REWARD_DEADLINE",
            ) from None
        return _response([spec.name for spec in request.rewards], len(request.media), outcomes)

    async def CheckRewards(
        self, request: pb.CheckRewardsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckRewardsResponse:
        """Score the golden images through the queues, as any other media."""
        names = sorted(set(request.names)) or list(self._queues)
        queues = [self._queue(name, f"names[{i}]") for i, name in enumerate(names)]
        deadline = time.monotonic() + self._timeout_s(context)
        return pb.CheckRewardsResponse(checks=await self._check(queues, deadline))

    def _jobs(self, request: pb.ScoreGroupRequest) -> list[tuple[RewardQueue, list[PendingItem]]]:
        """Per requested reward its queue and one item per medium. Raises for a request that cannot be tried."""
        if not request.media:
            raise InvalidArgument("media is empty; send at least one image", field="media")
        if not request.rewards:
            raise InvalidArgument(f"rewards is empty; name at least one of {self._hosted()}", field="rewards")
        if len(request.prompt) > MAX_PROMPT_CHARS:
            raise InvalidArgument(
                f"prompt has {len(request.prompt)} characters; at most {MAX_PROMPT_CHARS} are accepted", field="prompt"
            )
        metadata, jobs, seen = _to_dict(request.metadata, "metadata"), [], set[str]()
        for i, spec in enumerate(request.rewards):
            if spec.name in seen:
                raise InvalidArgument(
                    f"rewards[{i}].name repeats {spec.name!r}; ask for each reward once", field=f"rewards[{i}].name"
                )
            seen.add(spec.name)
            queue = self._queue(spec.name, f"rewards[{i}].name")
            params = parse_params(
                queue.reward.params_model, _to_dict(spec.params, f"rewards[{i}].params"), field=f"rewards[{i}].params"
            )
            accepts_video = queue.reward.accepts_video
            jobs.append((queue, [
                PendingItem(
                    functools.partial(
                        media.decode, medium, field=f"media[{k}]", blobs=self._blobs, accepts_video=accepts_video
                    ),
                    request.prompt,
                    metadata,
                    params,
                )
                for k, medium in enumerate(request.media)
            ]))  # fmt: skip
        return jobs

    def _queue(self, name: str, field: str) -> RewardQueue:
        if name not in self._queues:
            raise NotFound(
                f"{field}: this server hosts no reward {name!r}; {suggestion(name, self._queues)}",
                field=field,
                reason="REWARD_UNKNOWN",
            )
        return self._queues[name]

    def _hosted(self) -> str:
        return ", ".join(self._queues)

    def _timeout_s(self, context: grpc.aio.ServicerContext) -> float:
        left_s = context.time_remaining()
        return self._config.default_timeout_s if left_s is None else min(left_s, self._config.default_timeout_s)


def _queue_for(reward: Reward, config: RewardConfig, settings: RewardSettings) -> RewardQueue:
    def chosen(name: str) -> Any:
        own = getattr(settings.queue, name)
        return getattr(config, name) if own is None else own

    return RewardQueue(
        reward,
        max_batch=chosen("max_batch"),
        max_wait_s=chosen("max_wait_ms") / 1000,
        queue_limit=chosen("queue_limit"),
        threads=chosen("threads"),
    )


def _response(names: Sequence[str], media_count: int, outcomes: Sequence[Outcome]) -> pb.ScoreGroupResponse:
    """`outcomes` is ordered by reward, then by medium."""
    samples = [
        pb.SampleScores(scores=[_score(name, outcomes[r * media_count + k].result) for r, name in enumerate(names)])
        for k in range(media_count)
    ]
    return pb.ScoreGroupResponse(
        samples=samples,
        queue_time=duration(max(outcome.queue_s for outcome in outcomes)),
        scoring_time=duration(max(outcome.scoring_s for outcome in outcomes)),
    )


def _score(name: str, result: Score | HeadwaterError) -> RewardScore:
    if isinstance(result, HeadwaterError):
        return RewardScore(name=name, error=to_item_error(result))
    return RewardScore(name=name, value=result.value, details=result.details)


def _info(reward: Reward, check: pb.RewardCheck | None) -> pb.RewardInfo:
    info = pb.RewardInfo(
        name=reward.name,
        description=reward.description,
        minimum=reward.minimum,
        maximum=reward.maximum,
        accepts_video=reward.accepts_video,
        group_wise=is_group_wise(reward),
        check=check,
    )
    info.default_params.update(reward.params_model().model_dump(mode="json"))
    return info


def _to_dict(struct: Struct, field: str) -> dict[str, Any]:
    try:
        return json_format.MessageToDict(struct)
    except (json_format.Error, ValueError) as error:  # NaN, infinity, a value without a kind
        raise InvalidArgument(f"{field} is no JSON: {error}", field=field) from None
