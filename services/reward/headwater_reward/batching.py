"""One queue and one thread per reward: requests are batched together, and a slow reward never holds up a fast one."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.errors import DeadlineExceeded, HeadwaterError, Internal, InvalidArgument, OutOfBudget, Unavailable
from headwater_reward.registry import Reward, RewardParams, Score, ScoreItem

log = logging.getLogger("headwater.reward")


@dataclass(frozen=True)
class PendingItem:
    """One medium that waits for one reward. It is decoded by the reward's thread, so the queue holds encoded bytes."""

    decode: Callable[[], np.ndarray]  # -> uint8 [F, H, W, 3]; raises HeadwaterError
    prompt: str
    metadata: Mapping[str, Any]
    params: RewardParams


@dataclass(frozen=True)
class Outcome:
    """A score or an error, and the seconds it took."""

    result: Score | HeadwaterError
    queue_s: float
    scoring_s: float


@dataclass(frozen=True)
class _Entry:
    item: PendingItem
    future: "Future[Outcome]"
    group: object  # the same for all items of one submit
    enqueued_at: float  # time.monotonic()
    deadline: float  # time.monotonic()

    def is_dead(self, now: float) -> bool:
        return self.future.cancelled() or now >= self.deadline


class RewardQueue:
    """Batches the items of one reward across requests.

    The items of a group-wise reward are scored group by group: those of one `submit` together, and no others with them.
    Else a batch starts when `max_batch` items wait or the oldest has waited `max_wait_s`. Items whose deadline has
    passed or whose caller is gone are not scored. At most `queue_limit` items wait.
    """

    def __init__(
        self, reward: Reward, *, max_batch: int, max_wait_s: float, queue_limit: int, threads: int = 1
    ) -> None:
        self.reward, self._threads, self._group_wise = reward, threads, is_group_wise(reward)
        self._max_batch, self._max_wait_s, self._queue_limit = max_batch, max_wait_s, queue_limit
        self._entries: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._item_s = 0.1  # running mean of the seconds per item, for retry_after
        self._thread: threading.Thread | None = None
        self.scored_items = self.failed_items = 0
        self.scoring_s = self.waited_s = 0.0

    def start(self) -> "Future[None]":
        """Load the reward in its own thread; the future ends when it is ready or has failed."""
        ready: Future[None] = Future()
        # A daemon, so that a reward that hangs in foreign code cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(ready,), name=f"reward-{self.reward.name}", daemon=True)
        self._thread.start()
        return ready

    @property
    def waiting(self) -> int:
        """Items that wait."""
        return len(self._entries)

    @property
    def oldest_wait_s(self) -> float:
        """Seconds that the item in front has waited; 0 when none waits."""
        try:
            return time.monotonic() - self._entries[0].enqueued_at
        except IndexError:  # another thread took it
            return 0.0

    def close(self, timeout_s: float) -> bool:
        """Refuse new items, score what waits, end the thread. False when it has not ended after `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check_room(self, count: int) -> None:
        """Raises `OutOfBudget` when `count` more items do not fit now, `InvalidArgument` when they never will."""
        name = self.reward.name
        if count > self._queue_limit:
            raise InvalidArgument(
                f"media holds {count} items, but the queue of reward {name!r} holds {self._queue_limit}; "
                "send fewer at once or start the server with a larger --queue-limit",
                field="media",
                reason="GROUP_TOO_LARGE",
            )
        with self._changed:
            if self._closing:
                raise Unavailable("this reward server is draining; use another one", reason="DRAINING")
            if len(self._entries) + count > self._queue_limit:
                self._drop_dead()
            waiting, room = len(self._entries), self._queue_limit - len(self._entries)
        if count > room:
            raise OutOfBudget(
                f"the queue of reward {name!r} is full: {waiting} of {self._queue_limit} items wait and {count} came; "
                "try again later or add a reward server",
                reason="QUEUE_FULL",
                retry_after_s=min(60.0, max(0.1, (count - room) * self._item_s)),
            )

    def submit(self, items: Sequence[PendingItem], *, deadline: float) -> "list[Future[Outcome]]":
        """Queue items; `deadline` is on the clock of `time.monotonic()`. Cancelling a future withdraws its item."""
        self.check_room(len(items))
        now, group = time.monotonic(), object()
        entries = [_Entry(item, Future(), group, now, deadline) for item in items]
        with self._changed:
            self._entries.extend(entries)
            self._changed.notify_all()
        return [entry.future for entry in entries]

    def _drop_dead(self) -> None:
        now = time.monotonic()
        dead = [entry for entry in self._entries if entry.is_dead(now)]
        self._entries = deque(entry for entry in self._entries if not entry.is_dead(now))
        for entry in dead:
            self._claim(entry, now)

    def _claim(self, entry: _Entry, now: float) -> bool:
        """True when the entry is to be scored; else its future is ended here."""
        if not entry.future.set_running_or_notify_cancel():
            return False
        if now < entry.deadline:
            return True
        waited_s = now - entry.enqueued_at
        error = DeadlineExceeded(
            f"waited {waited_s:.2f} s for reward {self.reward.name!r} and was not scored: the deadline has passed; "
            "allow more time or add reward servers",
            reason="REWARD_DEADLINE",
        )
        entry.future.set_result(Outcome(error, waited_s, 0.0))
        return False

    def _run(self, ready: "Future[None]") -> None:
        try:
            self.reward.load(self._threads)
        except BaseException as error:  # the edge of this thread: whoever waits for `ready` decides
            ready.set_exception(error)
            return
        ready.set_result(None)
        while (batch := self._take_batch()) is not None:
            if batch:
                self._score_batch(batch)

    def _take_batch(self) -> list[_Entry] | None:
        """The next batch, possibly empty when all had expired; None when closing and nothing waits."""
        with self._changed:
            while not self._entries:
                if self._closing:
                    return None
                self._changed.wait()
            due = self._entries[0].enqueued_at + self._max_wait_s
            while len(self._entries) < self._max_batch and not self._closing and not self._group_wise:
                left_s = due - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            batch: list[_Entry] = []
            now, group = time.monotonic(), self._entries[0].group
            while self._entries and self._takes(self._entries[0], group, len(batch)):
                entry = self._entries.popleft()
                if self._claim(entry, now):
                    batch.append(entry)
            return batch

    def _takes(self, entry: _Entry, group: object, taken: int) -> bool:
        return entry.group is group if self._group_wise else taken < self._max_batch

    def _score_batch(self, batch: list[_Entry]) -> None:
        started = time.monotonic()
        results = score_items(self.reward, [entry.item for entry in batch], min(entry.deadline for entry in batch))
        took_s = time.monotonic() - started
        self.failed_items += (failed := sum(isinstance(result, HeadwaterError) for result in results))
        self.scored_items += len(batch) - failed
        self.scoring_s += took_s
        self.waited_s += sum(started - entry.enqueued_at for entry in batch)
        self._item_s += 0.2 * (took_s / len(batch) - self._item_s)
        log.debug("batch reward=%s items=%d seconds=%.3f", self.reward.name, len(batch), took_s)
        for entry, result in zip(batch, results, strict=True):
            entry.future.set_result(Outcome(result, started - entry.enqueued_at, took_s))


def is_group_wise(reward: Reward) -> bool:
    """Whether the reward is to see whole groups."""
    return bool(getattr(reward, "group_wise", False))


def score_items(
    reward: Reward, items: Sequence[PendingItem], deadline: float = math.inf
) -> list[Score | HeadwaterError]:
    """Decode and score; whatever goes wrong with one item is the error of that item alone."""
    results: list[Score | HeadwaterError] = [Internal("not scored")] * len(items)
    decoded: list[tuple[int, ScoreItem]] = []
    for i, item in enumerate(items):
        try:
            decoded.append((i, ScoreItem(item.decode(), item.prompt, item.metadata, item.params, deadline)))
        except HeadwaterError as error:
            results[i] = error
        except Exception as error:  # one item of many callers: it must not take the others down
            results[i] = _failed(reward, error)
    scores = _score(reward, [item for _, item in decoded])
    for (i, _), score in zip(decoded, scores, strict=True):
        results[i] = score
    return results


def _score(reward: Reward, items: list[ScoreItem]) -> list[Score | HeadwaterError]:
    if not items:
        return []
    try:
        scores = reward.score(items)
        if len(scores) != len(items):
            raise Internal(f"reward {reward.name!r} returned {len(scores)} scores for {len(items)} items")
    except Exception as error:  # a batch mixes callers: find the item at fault by scoring each alone
        if len(items) > 1 and not is_group_wise(reward):
            return [_score(reward, [item])[0] for item in items]
        return [error if isinstance(error, HeadwaterError) else _failed(reward, error)] * len(items)
    return [_finite(reward, score) for score in scores]


def _finite(reward: Reward, score: Score | HeadwaterError) -> Score | HeadwaterError:
    if isinstance(score, Score) and not math.isfinite(score.value):
        return Internal(f"reward {reward.name!r} computed {score.value}, which is no score", reason="REWARD_NOT_FINITE")
    return score


def _failed(reward: Reward, error: Exception) -> Internal:
    log.error("scoring failed reward=%s", reward.name, exc_info=error)
    return Internal(f"reward {reward.name!r} failed: {type(error).__name__}: {error}", reason="REWARD_FAILED")
