"""What a worker says of itself: state, load, and conditions that a person should know of."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import Unavailable
from headwater.rollout.v1.rollout_pb2 import WorkerState
from headwater.router.v1.router_pb2 import Condition, WorkerReport
from headwater.telemetry.metrics import Figure
from headwater_rollout.weight_receiver import WeightReceiver

log = logging.getLogger(__name__)


class WorkerStatus:
    """State of one worker. `changed` is set whenever the router should hear of it before the next heartbeat is due."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._conditions: dict[str, Condition] = {}
        self.changed = asyncio.Event()
        self.draining = False  # this process ends
        self.drained_by_operator = False
        self.sleeping = False
        self.active_groups = 0
        self.finished_groups = 0
        self.samples = self.published_groups = 0
        self.engine_s = self.scoring_s = 0.0
        self.reward_mean: float | None = None  # of the last group
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> "WorkerState.ValueType":
        """What the worker can be asked to do."""
        if self.draining or self.drained_by_operator:
            return WorkerState.WORKER_STATE_DRAINING
        if self.sleeping:
            return WorkerState.WORKER_STATE_SLEEPING
        if self._receiver.quarantined is not None:
            return WorkerState.WORKER_STATE_QUARANTINED
        return WorkerState.WORKER_STATE_READY

    def report(self) -> WorkerReport:
        """The report that heartbeats carry."""
        return WorkerReport(
            state=self.state,
            weight_version=self._receiver.version,
            active_groups=self.active_groups,
            finished_groups=self.finished_groups,
            conditions=self._conditions.values(),
        )

    def figures(self) -> Iterator[Figure]:
        """Load, work and weights, for Prometheus."""
        yield Figure("headwater_rollout_active_groups", "Groups in work", self.active_groups)
        yield Figure("headwater_rollout_finished_groups_total", "Groups finished since start", self.finished_groups)
        yield Figure("headwater_rollout_published_groups_total", "Groups put into the stream", self.published_groups)
        yield Figure("headwater_rollout_samples_total", "Samples generated and scored", self.samples)
        yield Figure("headwater_rollout_engine_seconds_total", "Seconds that the engine generated", self.engine_s)
        yield Figure("headwater_rollout_scoring_seconds_total", "Seconds waited for rewards", self.scoring_s)
        yield Figure("headwater_rollout_weight_step", "Step of the weights served", self._receiver.version.step)
        if self.reward_mean is not None:
            yield Figure("headwater_rollout_reward_mean", "Mean total reward of the last group", self.reward_mean)

    def check_admission(self) -> None:
        """Raise `Unavailable` while no new group is taken, with the reason."""
        if self.draining or self.drained_by_operator:
            raise Unavailable("this worker drains and takes no new groups; use another one", reason="WORKER_DRAINING")
        self.check_engine()

    def check_engine(self) -> None:
        """Raise `Unavailable` while the engine cannot generate. Groups taken before a drain still may: they finish."""
        if self.sleeping:
            raise Unavailable("this worker's memory is released; call ResumeMemory first", reason="WORKER_SLEEPING")
        if self._receiver.quarantined is not None:
            raise Unavailable(
                f"this worker's weights are not verified ({self._receiver.quarantined}); it serves again after a "
                "weight update succeeds",
                reason="WORKER_QUARANTINED",
            )

    @contextmanager
    def group(self) -> Iterator[None]:
        """Count a group as active while it is in work."""
        self.active_groups += 1
        self._idle.clear()
        try:
            yield
            self.finished_groups += 1
        finally:
            self.active_groups -= 1
            if self.active_groups == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no group is in work."""
        await self._idle.wait()

    def raise_condition(self, reason: str, message: str) -> None:
        """Add or update a condition; logged when it is new."""
        known = self._conditions.get(reason)
        if known is not None:
            known.message = message
            return
        log.warning("%s: %s", reason, message)
        self._conditions[reason] = Condition(reason=reason, message=message)
        self._conditions[reason].since.GetCurrentTime()
        self.changed.set()

    def clear_condition(self, reason: str) -> None:
        """Remove a condition; logged when it was there."""
        if self._conditions.pop(reason, None) is not None:
            log.info("%s is over", reason)
            self.changed.set()
