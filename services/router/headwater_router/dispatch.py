"""Which prompt goes to which worker, and when. Pure bookkeeping on one event loop: no I/O, no clock."""

import asyncio
import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import HeadwaterError
from headwater.versions import satisfies
from headwater_router.registry import Worker


@dataclass(eq=False)
class Ticket:
    """A prompt's place in the line and what it needs of a worker. It keeps its place when it has to wait again."""

    number: int
    sample_count: int = 1
    height_px: int = 0
    width_px: int = 0
    min_weight_version: WeightVersion | None = None
    budgeted: bool = False
    failed_on: dict[str, int] = field(default_factory=dict)
    """Heartbeats of each lease when it failed this prompt: it may try again after its next one, others first."""
    assigned: "asyncio.Future[Worker] | None" = None

    def refusal(self, worker: Worker) -> str:
        """Why this worker cannot serve this prompt whatever its load; empty when it can."""
        info, report = worker.registration.info, worker.report
        if reason := worker.blocked():
            return reason
        if info.max_group_size and self.sample_count > info.max_group_size:
            return f"takes at most {info.max_group_size} samples per group"
        multiple = max(1, info.size_multiple_px)
        if self.height_px % multiple or self.width_px % multiple:
            return f"makes multiples of {multiple} px only"
        if self.min_weight_version is not None and not satisfies(report.weight_version, self.min_weight_version):
            have, want = report.weight_version, self.min_weight_version
            return f"has weights {have.run_id!r} step {have.step}, the prompt needs {want.run_id!r} step {want.step}"
        if self.failed_on.get(worker.lease_id, -1) >= worker.heartbeats:
            return "has just failed this prompt"
        return ""


class Dispatcher:
    """First in, first out, but a prompt that no worker can serve now never holds up one behind it that some can."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = workers
        self._waiting: list[Ticket] = []
        self._assignments = 0
        self._closed: HeadwaterError | None = None

    @property
    def waiting(self) -> int:
        """Prompts in the line."""
        return len(self._waiting)

    @property
    def waiting_unbudgeted(self) -> int:
        """Those of them that no budget limits."""
        return sum(not ticket.budgeted for ticket in self._waiting)

    def enqueue(self, ticket: Ticket) -> None:
        """Put a ticket in the line at its old place; it may be given a worker at once."""
        ticket.assigned = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            ticket.assigned.set_exception(self._closed)
            return
        bisect.insort(self._waiting, ticket, key=lambda t: t.number)
        self.pump()

    async def acquire(self, ticket: Ticket) -> Worker:
        """Wait until an enqueued ticket has its worker; the caller bounds the wait. Then `release`."""
        assert ticket.assigned is not None, "enqueue the ticket first"
        return await ticket.assigned

    def release(self, ticket: Ticket) -> None:
        """Take a ticket out of the line, or free the worker that it was given. Idempotent."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        future, ticket.assigned = ticket.assigned, None
        if future is None or future.cancel() or future.cancelled() or future.exception():
            return
        future.result().assigned -= 1
        self.pump()

    def close(self, error: HeadwaterError) -> None:
        """Fail every waiting ticket, and all that come later, with `error`."""
        self._closed = error
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            if ticket.assigned is not None and not ticket.assigned.done():
                ticket.assigned.set_exception(error)

    def pump(self) -> None:
        """Give workers to all waiting tickets that can have one. Call it after anything has changed."""
        left = []
        free = sum(max(0, w.capacity - w.assigned) for w in self._workers if not w.blocked())
        for position, ticket in enumerate(self._waiting):
            if free == 0:
                left.extend(self._waiting[position:])
                break
            worker = self.choose(ticket)
            if worker is None or ticket.assigned is None or ticket.assigned.done():
                left.append(ticket)
                continue
            self._assignments += 1
            free, worker.assigned, worker.last_assigned = free - 1, worker.assigned + 1, self._assignments
            ticket.assigned.set_result(worker)
        self._waiting = left

    def choose(self, ticket: Ticket) -> Worker | None:
        """The least loaded worker (assigned groups relative to capacity) that may serve the ticket and has a slot.

        Workers that have failed this ticket come last; among equals the one that was given a group longest ago wins.
        """
        candidates = [w for w in self._workers if w.assigned < w.capacity and not ticket.refusal(w)]
        return min(
            candidates,
            key=lambda w: (w.lease_id in ticket.failed_on, w.assigned / w.capacity, w.last_assigned),
            default=None,
        )

    def explain(self, ticket: Ticket) -> str:
        """Why no worker can serve the ticket; empty when one can and is only busy."""
        reasons = {worker.worker_id: ticket.refusal(worker) for worker in self._workers}
        if not all(reasons.values()):
            return ""
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no worker is registered"
