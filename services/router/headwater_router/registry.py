"""The workers: leases, heartbeats, expiry, and whether a worker takes new groups."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import InvalidArgument, NotFound
from headwater.rollout.v1.rollout_pb2 import WorkerState
from headwater.router.v1.router_pb2 import DrainWorkerRequest, RegisterWorkerRequest, WorkerReport

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Worker:
    """One registration of a worker. A worker that registers again is a new object with a new lease."""

    lease_id: str
    registration: RegisterWorkerRequest
    report: WorkerReport
    heartbeat_at: float
    heartbeats: int = 0
    assigned: int = 0
    last_assigned: int = 0
    drain_reason: str = ""
    quarantined_at: WeightVersion | None = None
    quarantine_reason: str = ""
    suspended: str = ""
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def worker_id(self) -> str:
        """Its id, stable over registrations."""
        return self.registration.worker_id

    @property
    def capacity(self) -> int:
        """Groups that it may be given at once."""
        return self.registration.capacity_groups

    def blocked(self) -> str:
        """Why it takes no new groups at all; empty when it does."""
        if self.lost.is_set():
            return "it is gone"
        if self.drain_reason:
            return f"drained: {self.drain_reason}"
        if self.quarantined_at is not None:
            return f"quarantined until its weights are newer: {self.quarantine_reason}"
        if self.report.state != WorkerState.WORKER_STATE_READY:
            return f"its state is {WorkerState.Name(self.report.state).removeprefix('WORKER_STATE_')}"
        return self.suspended


def is_newer(version: WeightVersion, than: WeightVersion) -> bool:
    """Whether weights are of another run or of a later step."""
    return version.run_id != than.run_id or version.step > than.step


class Registry:
    """All live workers by id. `on_change` runs after every change, `on_lost` once for each registration that ends."""

    def __init__(
        self,
        *,
        expiry_s: float,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[Worker], None] = lambda worker: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expiry_s = expiry_s
        self.on_change = on_change
        self.on_lost = on_lost
        self.clock = clock
        self._by_id: dict[str, Worker] = {}
        self._by_lease: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        """The workers, sorted by id."""
        return iter([self._by_id[worker_id] for worker_id in sorted(self._by_id)])

    def register(self, request: RegisterWorkerRequest) -> Worker:
        """Add a worker, or replace the one of the same id; its groups then go elsewhere, a quarantine stays."""
        _check_registration(request)
        report = WorkerReport()
        report.CopyFrom(request.report)
        worker = Worker(uuid.uuid4().hex, request, report, self.clock())
        old = self._by_id.get(request.worker_id)
        if old is not None:
            worker.quarantined_at, worker.quarantine_reason = old.quarantined_at, old.quarantine_reason
            self._lift_quarantine(worker)
            self._remove(old, "registered again")
        self._by_id[worker.worker_id] = self._by_lease[worker.lease_id] = worker
        log.info(
            "worker %s registered address=%s capacity=%d", worker.worker_id, request.address, request.capacity_groups
        )
        self.on_change()
        return worker

    def heartbeat(self, lease_id: str, report: WorkerReport) -> Worker:
        """Renew a lease. Raises `NotFound` when the lease is unknown: the worker must register again."""
        worker = self._by_lease.get(lease_id)
        if worker is None:
            raise NotFound("this lease has expired or was never given; register again", reason="LEASE_UNKNOWN")
        worker.heartbeat_at = self.clock()
        worker.heartbeats += 1
        worker.suspended = ""
        worker.report.CopyFrom(report)
        self._lift_quarantine(worker)
        self.on_change()
        return worker

    def suspend(self, worker: Worker, reason: str) -> None:
        """Send it nothing until its next heartbeat: a worker that fails at once is always the least loaded one."""
        worker.suspended = f"waits for its next heartbeat: {reason}"
        self.on_change()

    def drain(self, request: DrainWorkerRequest) -> Worker:
        """Take a worker out, for good or until its weights are newer. Raises `NotFound`."""
        worker = self._by_id.get(request.worker_id)
        if worker is None:
            known = ", ".join(sorted(self._by_id)) or "none"
            raise NotFound(
                f"no worker {request.worker_id!r}; registered: {known}", field="worker_id", reason="WORKER_UNKNOWN"
            )
        reason = request.reason or "asked by an operator"
        if request.quarantine:
            worker.quarantined_at, worker.quarantine_reason = WeightVersion(), reason
            worker.quarantined_at.CopyFrom(worker.report.weight_version)
        else:
            worker.drain_reason = reason
        log.info("worker %s takes no new groups: %s", worker.worker_id, worker.blocked())
        self.on_change()
        return worker

    def deregister(self, lease_id: str) -> None:
        """Remove a worker; an unknown lease is fine."""
        worker = self._by_lease.get(lease_id)
        if worker is not None:
            self._remove(worker, "deregistered")
            self.on_change()

    def expire(self) -> None:
        """Remove the workers that have been silent for too long."""
        late = [worker for worker in self if self.clock() - worker.heartbeat_at >= self._expiry_s]
        for worker in late:
            self._remove(worker, f"silent for {self._expiry_s:g} s")
        if late:
            self.on_change()

    async def expire_forever(self) -> None:
        """Call `expire` whenever the next lease may run out. Sleeps in between: a later lease cannot end sooner."""
        while True:
            oldest = min((worker.heartbeat_at for worker in self), default=self.clock())
            await asyncio.sleep(max(0.01, oldest + self._expiry_s - self.clock()))
            self.expire()

    def _remove(self, worker: Worker, why: str) -> None:
        log.info("worker %s is gone: %s assigned_groups=%d", worker.worker_id, why, worker.assigned)
        del self._by_id[worker.worker_id], self._by_lease[worker.lease_id]
        worker.lost.set()
        self.on_lost(worker)

    @staticmethod
    def _lift_quarantine(worker: Worker) -> None:
        if worker.quarantined_at is not None and is_newer(worker.report.weight_version, worker.quarantined_at):
            log.info("worker %s leaves quarantine step=%d", worker.worker_id, worker.report.weight_version.step)
            worker.quarantined_at, worker.quarantine_reason = None, ""


def _check_registration(request: RegisterWorkerRequest) -> None:
    if not request.worker_id:
        raise InvalidArgument("worker_id is empty; give an id that is unique among the workers", field="worker_id")
    host, _, port = request.address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(
            f"address {request.address!r} is not host:port as the router reaches the worker", field="address"
        )
    if request.capacity_groups < 1:
        raise InvalidArgument("capacity_groups is 0; it must be at least 1", field="capacity_groups")
