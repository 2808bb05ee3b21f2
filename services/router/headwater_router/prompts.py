"""The life of a prompt: admission, the line, attempts on workers, and its end. One asyncio task per prompt."""

import asyncio
import itertools
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable

import grpc

from headwater.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    HeadwaterError,
    NotFound,
    OutOfBudget,
    Unavailable,
)
from headwater.router.v1.router_pb2 import Prompt
from headwater_router.attempts import Attempts, Group, reworded
from headwater_router.budget import RETRY_AFTER_S, Budgets
from headwater_router.config import RouterConfig
from headwater_router.dispatch import Dispatcher, Ticket
from headwater_router.live import Live, draining_error
from headwater_router.registry import Registry, Worker
from headwater_router.validation import check_prompt, timeout_seconds, to_group_request

log = logging.getLogger(__name__)

REMEMBERED_ENDED = 10_000
"""Ended requests that CancelRequest still knows."""

STALE_REASON = "WEIGHTS_TOO_OLD"
"""How a worker says that its weights are older than the prompt's min_weight_version: no failure, another will do."""

FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)  # fmt: skip
"""Codes that another worker would give as well. Everything else is the worker's own trouble: try another one."""


class Prompts:
    """All live prompts."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        dispatcher: Dispatcher,
        budgets: Budgets,
        attempts: Attempts,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._registry, self._dispatcher = config, registry, dispatcher
        self._budgets, self._attempts, self._on_change = budgets, attempts, on_change
        self._live: dict[str, Live] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count()
        self.draining = asyncio.Event()
        self.finished_groups = self.failed_prompts = self.retried_attempts = 0

    @property
    def running(self) -> int:
        """Prompts that a worker is serving."""
        return sum(live.running_on is not None for live in self._live.values())

    def start(self, prompt: Prompt) -> Live:
        """Admit a prompt and start its task. Raises the error that the client is told."""
        if self.draining.is_set():
            raise draining_error()
        check_prompt(prompt, (worker.registration.info for worker in self._registry))
        filled = Prompt()
        filled.CopyFrom(prompt)
        filled.request_id = prompt.request_id or uuid.uuid4().hex
        filled.group_id = prompt.group_id or filled.request_id
        if filled.request_id in self._live:
            raise AlreadyExists(
                f"request {filled.request_id!r} is running; wait for it, cancel it, or choose another id",
                field="prompt.request_id",
                reason="REQUEST_RUNNING",
            )
        budgeted = self._charge(filled)
        live = self._admit(filled, budgeted)
        self._on_change()
        return live

    def _charge(self, prompt: Prompt) -> bool:
        if prompt.run_id and self._budgets.covers(prompt.run_id):
            self._budgets.charge(prompt.run_id, prompt.group_id)
            return True
        if self._dispatcher.waiting_unbudgeted >= self._config.queue_capacity:
            raise OutOfBudget(
                f"{self._config.queue_capacity} prompts are waiting already; submit again later, or add workers",
                reason="QUEUE_FULL",
                retry_after_s=RETRY_AFTER_S,
            )
        return False

    def _admit(self, prompt: Prompt, budgeted: bool) -> Live:
        request = to_group_request(prompt)
        timeout_s = timeout_seconds(prompt, default=self._config.default_timeout_s)
        ticket = Ticket(
            number=next(self._numbers),
            sample_count=len(request.seeds),
            height_px=prompt.sampling.height_px,
            width_px=prompt.sampling.width_px,
            min_weight_version=request.min_weight_version if request.HasField("min_weight_version") else None,
            budgeted=budgeted,
        )
        loop = asyncio.get_running_loop()
        position = self._dispatcher.waiting
        self._dispatcher.enqueue(ticket)
        live = Live(prompt.request_id, request, ticket, loop.time() + timeout_s, timeout_s, position)
        self._live[live.request_id] = live
        live.task = loop.create_task(self._work(live))
        live.task.add_done_callback(lambda _: self._end(live))
        return live

    async def _work(self, live: Live) -> Group:
        try:
            async with asyncio.timeout_at(live.deadline):
                while True:
                    worker = await self._dispatcher.acquire(live.ticket)
                    group = await self._attempt(live, worker)
                    if group is not None:
                        return group
                    live.running_on = None
                    self._dispatcher.enqueue(live.ticket)
                    self._on_change()
        except TimeoutError:
            raise live.too_late(self._dispatcher.explain(live.ticket)) from None

    async def _attempt(self, live: Live, worker: Worker) -> Group | None:
        """The group, or None when it is worth another attempt."""
        live.running_on = worker
        self._on_change()
        try:
            left_s = live.deadline - asyncio.get_running_loop().time()
            return await self._attempts.generate(worker, live.request, left_s)
        except HeadwaterError as error:
            self._judge(live, worker, error)
            return None
        finally:
            self._dispatcher.release(live.ticket)

    def _judge(self, live: Live, worker: Worker, error: HeadwaterError) -> None:
        """Raise `error` when it is final; else note that this worker failed."""
        stale = isinstance(error, FailedPrecondition) and error.reason == STALE_REASON
        if error.code in FINAL and not stale:
            raise error
        live.ticket.failed_on[worker.lease_id] = worker.heartbeats
        if stale:
            log.info("request %s waits for newer weights: %s", live.request_id, error.message)
            return
        live.attempts += 1
        if isinstance(error, Unavailable) and not worker.lost.is_set():
            self._registry.suspend(worker, error.message)
        if live.attempts >= self._config.max_attempts:
            raise reworded(error, f"{error.message} (attempt {live.attempts} of {self._config.max_attempts})")
        self.retried_attempts += 1
        log.warning("request %s is tried again after attempt %d: %s", live.request_id, live.attempts, error.message)

    def _end(self, live: Live) -> None:
        self._dispatcher.release(live.ticket)
        del self._live[live.request_id]
        self._ended[live.request_id] = None
        self._ended.move_to_end(live.request_id)
        if len(self._ended) > REMEMBERED_ENDED:
            self._ended.popitem(last=False)
        result = live.result()
        if isinstance(result, Group):
            self.finished_groups += 1
        else:
            self.failed_prompts += 1
            log.info("request %s failed: %s %s", live.request_id, result.code.name, result.message)
        self._on_change()

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when it had ended. Raises `NotFound` for an id never seen."""
        live = self._live.get(request_id)
        if live is not None:
            live.stop(Cancelled(f"request {request_id!r} was cancelled on request", reason="CANCELLED_ON_REQUEST"))
            return True
        if request_id in self._ended:
            return False
        raise NotFound(f"no request {request_id!r} was ever admitted", field="request_id", reason="REQUEST_UNKNOWN")

    async def drain(self, grace_s: float) -> None:
        """Refuse new prompts, fail the waiting ones, give the running ones `grace_s`, then stop them."""
        self.draining.set()
        self._dispatcher.close(draining_error())
        self._on_change()
        tasks = [live.task for live in self._live.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for live in list(self._live.values()):
            live.stop(draining_error())
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
