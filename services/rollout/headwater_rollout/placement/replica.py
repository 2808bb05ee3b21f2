"""One engine of a placement: its actor, what is known of it, and when it is started again."""

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from headwater_rollout.placement.router_view import Seen

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0
"""Having served for so long, a replica that fails again begins with the first backoff."""
SILENCE_S = 60.0
"""An actor that has answered before and does not for so long is killed and replaced."""


class Replica:
    """Drives one actor with `tick`, never waiting. States: waiting, pending, starting, serving."""

    def __init__(self, worker_id: str, create: Callable[[], Any]) -> None:
        """`create` makes a new actor in the place that is reserved for this engine."""
        self.worker_id = worker_id
        self._create = create
        self._actor: Any = None
        self._asked: Any = None  # the poll that is under way
        self._report: dict[str, Any] = {}
        self._address = ""
        self.state = "waiting"
        self.failures = 0
        self.has_served = False
        self._changed_at = self._heard_at = self._start_at = time.monotonic()

    def tick(self, seen: dict[str, Seen]) -> None:
        """Take one look, and start or replace the actor when that is due."""
        now = time.monotonic()
        if self._actor is None:
            if now >= self._start_at:
                self._actor, self._asked, self._report, self._heard_at = self._create(), None, {}, now
                self._start_at = now
                self._become("pending")
            return
        try:
            self._listen(now)
        except RayError as error:
            self._fail(_first_line(error))
            return
        self._note(now, seen.get(self.worker_id))

    def _listen(self, now: float) -> None:
        if self._asked is None:
            self._asked = self._actor.poll.remote()
        if ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            try:
                self._report = ray.get(asked)
                self._heard_at = now
            except ActorUnavailableError:
                pass  # its machine cannot be reached now; Ray will say if it is lost

    def _note(self, now: float, seen: Seen | None) -> None:
        if not self._report:
            return  # without an answer yet: its machine is gone and no other has room, or the actor is being started
        if (code := self._report["exit_code"]) is not None:
            self._fail(f"the worker ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
        elif now - self._heard_at > SILENCE_S:
            self._fail(f"the actor has not answered for {SILENCE_S:.0f} s")
        elif self.state == "pending":
            self._become("starting")
        elif (
            seen is not None
            and seen.heartbeat_at > self._start_at
            and (self.state != "serving" or seen.address != self._address)
        ):
            self._address, self.has_served = seen.address, True
            self._become("serving")
        elif self.state == "serving" and now - self._changed_at > STEADY_S:
            self.failures = 0

    def _fail(self, why: str) -> None:
        delay = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self.failures)
        self.failures += 1
        self.kill()
        self._start_at = time.monotonic() + delay
        self._become("waiting", f' reason="{why}" restart_in_s={delay:g}')

    def _become(self, state: str, extra: str = "") -> None:
        self.state, self._changed_at = state, time.monotonic()
        log.info("replica %s%s", self.describe(), extra)

    def describe(self) -> str:
        """Worker, state, machine and address, for a line of the log."""
        words = [f"worker={self.worker_id}", f"state={self.state}"]
        if self._report:
            words.append(
                f"node={self._report['node_id'][:8]} ip={self._report['ip']} actor_pid={self._report['actor_pid']} "
                f"worker_pid={self._report['worker_pid']}"
            )
        if self.state == "serving":
            words.append(f"address={self._address}")
        return " ".join(words)

    def drain(self, grace_s: float) -> Any:
        """Ask the worker to drain: a reference to whether it left by itself; None when there is no worker to ask."""
        if self._actor is None or not self._report:
            self.kill()
            return None
        return self._actor.stop.remote(grace_s)

    def kill(self) -> None:
        """End the actor, and its worker with it. Idempotent."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        self._actor, self._asked, self._report = None, None, {}


def _first_line(error: RayError) -> str:
    """What Ray says in pages, short: its last line tells the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else "".join(lines)
