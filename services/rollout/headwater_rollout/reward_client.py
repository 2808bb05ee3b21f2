"""Rewards of a group, from whichever configured servers host them."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.struct_pb2 import Struct

from headwater.common.v1.reward_pb2 import RewardScore, RewardSpec
from headwater.common.v1.sample_pb2 import Media
from headwater.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HeadwaterError,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfBudget,
    Unavailable,
    to_item_error,
)
from headwater.reward.v1.reward_pb2 import ListRewardsRequest, RewardInfo, ScoreGroupRequest
from headwater.reward.v1.reward_pb2_grpc import RewardServiceStub
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater_rollout.circuit_breaker import CircuitBreaker
from headwater_rollout.reward_policy import (
    POLICY,
    GroupDropped,
    Scores,
    parts_of,
    policy_of,
    read_scores,
    unknown_reward,
)
from headwater_rollout.status import WorkerStatus

if TYPE_CHECKING:
    from headwater.reward.v1.reward_pb2_grpc import RewardServiceAsyncStub

log = logging.getLogger(__name__)

SERVICE = "headwater.reward.v1.RewardService"
CONDITION = "REWARD_UNAVAILABLE"
LIST_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 3.0
PATIENCE_S = 5.0  # how long a reward that may be dropped is tried again, so that one blip drops nothing
MONITOR_TIMEOUT_S = 60.0  # how long a group is held for a reward that is only watched
_RETRYABLE = (Unavailable, OutOfBudget, DeadlineExceeded)


class RewardClient:
    """Finds the server of each reward, scores groups, and retries as each reward's failure policy says."""

    def __init__(self, addresses: Sequence[str], status: WorkerStatus) -> None:
        self._status = status
        self._stubs: dict[str, RewardServiceAsyncStub] = {}
        self._channels: list[grpc.aio.Channel] = []
        for address in addresses:
            self._channels.append(aio_channel(address, health_service=SERVICE))
            self._stubs[address] = RewardServiceStub(self._channels[-1])
        self._hosted: dict[str, Mapping[str, RewardInfo]] = {}  # by address; the last answer of each server
        self._down: dict[str, str] = {}  # by address: what went wrong
        self._breaker = CircuitBreaker()
        self._turn = itertools.count()

    async def check(self, specs: Sequence[RewardSpec], deadline: float) -> None:
        """Check before generating that every reward has a server and takes its parameters.

        Waits until `deadline` (time.monotonic) for servers that do not answer. Raises `NotFound` naming the known
        rewards, `InvalidArgument` for an unknown parameter, `FailedPrecondition` without servers or when every server's
        golden images fail, `Unavailable`. What is only watched is never a reason to stop, but for a wrong parameter.
        """
        if specs and not self._stubs:
            raise FailedPrecondition(
                "rewards are asked for, but this worker was started without --reward ADDR", reason="REWARD_NO_SERVER"
            )
        needed = {spec.name for spec in specs if policy_of(spec) != POLICY.REWARD_FAILURE_POLICY_DROP_REWARD}
        delay_s = 0.2
        while missing := {spec.name for spec in specs} - self._known():
            unanswered = await self._refresh()
            missing -= self._known()
            if not missing & needed:
                break
            if not unanswered:
                raise unknown_reward(missing & needed, specs, self._known())
            if time.monotonic() + delay_s > deadline:
                raise self._unreachable(unanswered)
            await asyncio.sleep(delay_s)
            delay_s = min(3.0, delay_s * 1.5)
        for index, spec in enumerate(specs):
            self._check_params(spec, f"rewards[{index}].params")
            if spec.name in needed:
                await self._check_golden(spec.name, f"rewards[{index}].name")

    async def watch(self) -> None:
        """Learn what the servers host, and notice without being asked for a score that one answers again."""
        await self._refresh()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._down:
                await self._refresh()

    async def score(
        self,
        *,
        group_id: str,
        prompt: str,
        metadata: Struct,
        media: Sequence[Media],
        specs: Sequence[RewardSpec],
        deadline: float,
    ) -> list[Scores]:
        """Scores [len(specs)][len(media)]. A reward that may be dropped has an error in place of its values.

        Raises `GroupDropped` for policy DROP_GROUP, and for RETRY and FAIL_RUN the error that persisted.
        """

        async def one(index: int, spec: RewardSpec) -> Scores:
            scores: Scores = []
            for part in parts_of(media):
                request = ScoreGroupRequest(
                    group_id=group_id, prompt=prompt, metadata=metadata, media=part, rewards=[spec]
                )
                try:
                    scores += await self._score_with_policy(request, spec, deadline)
                except HeadwaterError as error:  # the server was asked for this reward alone
                    error.field = error.field.replace("rewards[0]", f"rewards[{index}]")
                    raise
            return scores

        tasks = [asyncio.ensure_future(one(index, spec)) for index, spec in enumerate(specs)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    async def _score_with_policy(self, request: ScoreGroupRequest, spec: RewardSpec, deadline: float) -> Scores:
        policy = policy_of(spec)
        retry = policy == POLICY.REWARD_FAILURE_POLICY_RETRY
        now = time.monotonic()
        if policy == POLICY.REWARD_FAILURE_POLICY_DROP_REWARD:
            deadline = min(deadline, now + MONITOR_TIMEOUT_S)
        give_up = deadline if retry else min(deadline, now + (0.0 if self._down else PATIENCE_S))
        try:
            return await self._score_until(request, spec, deadline, give_up)
        except HeadwaterError as error:
            if policy == POLICY.REWARD_FAILURE_POLICY_DROP_REWARD:
                failed = RewardScore(name=spec.name, error=to_item_error(error))
                return [failed for _ in request.media]
            if policy == POLICY.REWARD_FAILURE_POLICY_DROP_GROUP:
                raise GroupDropped(spec.name, error) from error
            if policy == POLICY.REWARD_FAILURE_POLICY_FAIL_RUN:
                raise FailedPrecondition(
                    f"reward {spec.name!r} failed, and its policy is to fail the run: {error.message}",
                    reason="REWARD_FAILS_RUN",
                ) from error
            raise

    async def _score_until(
        self, request: ScoreGroupRequest, spec: RewardSpec, deadline: float, give_up: float
    ) -> Scores:
        """Try again with backoff while it can help; only the first attempt may start after `give_up`."""
        delay_s = 0.1
        while True:
            try:
                return await self._score_once(request, spec, deadline)
            except _RETRYABLE as error:
                delay_s = max(delay_s, min(error.retry_after_s or 0.0, 5.0))
                if time.monotonic() + delay_s > give_up:
                    raise
                await asyncio.sleep(delay_s)
                delay_s = min(3.0, delay_s * 1.5)

    async def _score_once(self, request: ScoreGroupRequest, spec: RewardSpec, deadline: float) -> Scores:
        address = self._choose(spec.name)
        timeout_s = max(0.5, deadline - time.monotonic())
        self._breaker.calls(address)
        try:
            response = await self._stubs[address].ScoreGroup(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, Unavailable):
                self._set_down(address, error)
                raise self._unreachable([address]) from error
            if isinstance(error, NotFound):  # the server was restarted with other rewards
                self._hosted.pop(address, None)
                await self._refresh()
                if spec.name in self._known():
                    raise Unavailable(f"reward {spec.name!r} has moved from {address}") from error
            if isinstance(error, DeadlineExceeded | Internal):
                self._breaker.failed(address)
            raise error from rpc_error
        self._set_up(address)
        self._breaker.succeeded(address)
        return read_scores(response, spec, len(request.media))

    def _choose(self, name: str) -> str:
        """A server that hosts the reward, in turn; one that answered last rather than one that did not."""
        hosts = [address for address, rewards in self._hosted.items() if name in rewards]
        if not hosts:
            silent = [address for address in self._stubs if address not in self._hosted]
            if not silent:
                raise Unavailable(f"no reward server hosts {name!r} now", reason="REWARD_UNKNOWN")
            raise self._unreachable(silent)
        hosts = [address for address in hosts if not self._golden_failure(address, name)] or hosts
        if not (closed := self._breaker.closed(hosts)):
            raise Unavailable(
                f"reward {name!r}: {', '.join(hosts)} failed several times in a row and rests; see its log",
                reason="REWARD_CIRCUIT_OPEN",
                retry_after_s=self._breaker.wait_s(hosts),
            )
        live = [address for address in closed if address not in self._down] or closed
        return live[next(self._turn) % len(live)]

    def _known(self) -> set[str]:
        return {name for rewards in self._hosted.values() for name in rewards}

    async def _refresh(self) -> list[str]:
        """Ask every server what it hosts; returns the addresses that did not answer."""
        answers = await asyncio.gather(*(self._list(address) for address in self._stubs))
        return [address for address, answered in zip(self._stubs, answers, strict=True) if not answered]

    async def _list(self, address: str) -> bool:
        try:
            response = await self._stubs[address].ListRewards(ListRewardsRequest(), timeout=LIST_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._set_down(address, from_rpc_error(error))
            return False
        self._hosted[address] = {info.name: info for info in response.rewards}
        self._set_up(address)
        return True

    async def _check_golden(self, name: str, field: str) -> None:
        """Raises `FailedPrecondition` when all servers of a reward say that its golden images fail."""

        def failures() -> list[str]:
            hosts = [address for address, rewards in self._hosted.items() if name in rewards]
            found = [f"{address}: {text}" for address in hosts if (text := self._golden_failure(address, name))]
            return found if len(found) == len(hosts) else []

        if failures():
            await self._refresh()  # somebody may have repaired it
        if failed := failures():
            raise FailedPrecondition(
                f"reward {name!r} fails its golden images ({'; '.join(failed)}), so its scores mean nothing; repair it "
                "and start its server again, or have it check again: headwater reward check",
                field=field,
                reason="REWARD_CHECK_FAILED",
            )

    def _golden_failure(self, address: str, name: str) -> str:
        """What failed in the last self-test of a server; "" when it has passed or was not made."""
        info = self._hosted[address][name]
        return info.check.detail if info.HasField("check") and not info.check.passed else ""

    def _check_params(self, spec: RewardSpec, field: str) -> None:
        infos = [rewards[spec.name] for rewards in self._hosted.values() if spec.name in rewards]
        for key in spec.params.fields if infos else ():
            if key not in infos[0].default_params.fields:
                known = ", ".join(sorted(infos[0].default_params.fields)) or "none"
                raise InvalidArgument(
                    f"{field}.{key} is no parameter of reward {spec.name!r}; it has: {known}", field=f"{field}.{key}"
                )

    def _set_down(self, address: str, error: HeadwaterError) -> None:
        self._down[address] = error.message
        self._status.raise_condition(CONDITION, self._unreachable(self._down).message)

    def _set_up(self, address: str) -> None:
        if self._down.pop(address, None) is not None and not self._down:
            self._status.clear_condition(CONDITION)

    def _unreachable(self, addresses: Iterable[str]) -> Unavailable:
        parts = []
        for address in addresses:
            names = ", ".join(sorted(self._hosted.get(address, ()))) or "its rewards are not known yet"
            parts.append(f"reward server {address} ({names}) does not answer: {self._down.get(address, 'no reply')}")
        return Unavailable(
            f"{'; '.join(parts)}. Start it with `headwater-reward --bind ADDRESS`, or correct --reward; groups that "
            "wait for it go on by themselves",
            reason=CONDITION,
        )
