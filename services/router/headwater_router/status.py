"""The state of the router as clients see it, and a signal that it has changed."""

import asyncio
from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from headwater.errors import duration
from headwater.router.v1.router_pb2 import BudgetStatus, GetStatusResponse, WorkerStatus
from headwater_router.budget import Budgets
from headwater_router.dispatch import Dispatcher
from headwater_router.prompts import Prompts
from headwater_router.registry import Worker


class Change:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something has changed."""
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """An event that the next change sets. Take it before reading the state, so that none is missed."""
        return self._event


def build_status(
    *,
    workers: Iterable[Worker],
    now: float,
    dispatcher: Dispatcher,
    prompts: Prompts,
    budgets: Budgets,
    queue_capacity: int,
    started_at: Timestamp,
) -> GetStatusResponse:
    """The status message; `now` is the clock that heartbeats are measured with."""
    return GetStatusResponse(
        workers=[_worker_status(worker, now) for worker in workers],
        queued_prompts=dispatcher.waiting,
        running_prompts=prompts.running,
        finished_groups=prompts.finished_groups,
        failed_prompts=prompts.failed_prompts,
        retried_attempts=prompts.retried_attempts,
        budgets=[BudgetStatus(run_id=r, capacity_groups=c, charged_groups=n) for r, c, n in budgets],
        queue_capacity=queue_capacity,
        started_at=started_at,
    )


def _worker_status(worker: Worker, now: float) -> WorkerStatus:
    reason = worker.blocked()
    return WorkerStatus(
        worker_id=worker.worker_id,
        address=worker.registration.address,
        info=worker.registration.info,
        report=worker.report,
        assigned_groups=worker.assigned,
        capacity_groups=worker.capacity,
        heartbeat_age=duration(max(0.0, now - worker.heartbeat_at)),
        accepting=not reason,
        not_accepting_reason=reason,
    )
