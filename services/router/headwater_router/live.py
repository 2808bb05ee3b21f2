"""A prompt between its admission and its end."""

import asyncio
from dataclasses import dataclass, field

from headwater.errors import Cancelled, DeadlineExceeded, HeadwaterError, Internal, Unavailable
from headwater.rollout.v1.rollout_pb2 import GenerateGroupRequest
from headwater_router.attempts import Group
from headwater_router.budget import RETRY_AFTER_S
from headwater_router.dispatch import Ticket
from headwater_router.registry import Worker


@dataclass(eq=False)
class Live:
    """A prompt that was admitted and has not ended."""

    request_id: str
    request: GenerateGroupRequest
    ticket: Ticket
    deadline: float  # in loop time
    timeout_s: float
    queue_position: int
    task: "asyncio.Task[Group]" = field(init=False)
    attempts: int = 0
    running_on: Worker | None = None
    stopped: HeadwaterError | None = None
    """Why it was stopped from outside."""

    def stop(self, error: HeadwaterError) -> None:
        """End it with `error`; its worker call is cancelled."""
        self.stopped = self.stopped or error
        self.task.cancel()

    def too_late(self, explanation: str) -> HeadwaterError:
        """The error of a passed deadline; `explanation` says why no worker could serve it, empty when one could."""
        within = f"within {self.timeout_s:g} s"
        if self.running_on is not None:
            worker = self.running_on.worker_id
            return DeadlineExceeded(f"worker {worker} did not finish the group {within}; allow a longer timeout")
        if explanation:
            return Unavailable(f"no worker could serve the prompt {within}: {explanation}", reason="NO_WORKER")
        return DeadlineExceeded(f"no worker was free {within}; add workers or allow a longer timeout")

    def result(self) -> Group | HeadwaterError:
        """What an ended prompt came to."""
        if self.task.cancelled():
            return self.stopped or Cancelled("the prompt was cancelled")
        error = self.task.exception()
        if error is None:
            return self.task.result()
        return error if isinstance(error, HeadwaterError) else Internal(f"unexpected {type(error).__name__}: {error}")


def draining_error() -> Unavailable:
    """What prompts are told once the router leaves."""
    return Unavailable(
        "the router is shutting down; submit again when it is back", reason="DRAINING", retry_after_s=RETRY_AFTER_S
    )
