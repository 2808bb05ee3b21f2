"""The reading end of the stream of scored groups: at-least-once delivery to one trainer.

An entry stays pending until `ack`, which the trainer calls once the checkpoint that contains it is durable. After a
restart under the same consumer name, `read` gives the pending entries again before any new one.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from redis.exceptions import RedisError, ResponseError

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.stream.connection import RETRYABLE, Timeouts, explain, sync_client
from headwater.stream.keys import CONSUMER_GROUP, RunKeys

MAX_FAILURES = 3
_BLOCK_SLICE_S = 2.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Entry:
    """One stream entry: its id (to acknowledge it with) and the group it holds."""

    id: str
    group: ScoredGroup


@dataclass(frozen=True)
class DeadEntry:
    """A group that was given up, and why."""

    entry_id: str
    group_id: str
    reason: str


class ScoredStream:
    """Reads `hw:{run}:scored` for the trainer. Blocking; use it from one thread."""

    def __init__(
        self, redis_url: str, run_id: str, consumer: str = "trainer", timeouts: Timeouts | None = None,
    ) -> None:  # fmt: skip
        self.keys = RunKeys(run_id)
        self._url = redis_url
        self._consumer = consumer
        self._timeouts = timeouts or Timeouts()
        self._redis: Any = sync_client(redis_url, self._timeouts)  # redis-py's types mix sync and async
        self._opened = False
        self._pending_cursor: str | None = "0"  # next pending entry to read again; None when all were read
        self._delivered: set[str] = set()  # read and not acknowledged, in this process
        self._retry: list[str] = []  # failed and to be read again
        self._died: list[str] = []

    def open(self) -> None:
        """Connect and create stream and consumer group. `Unavailable`, within the connect timeout, without a Redis."""
        try:
            self._redis.ping()
            self._create_group()
        except RedisError as error:
            raise explain(error, self._url) from error
        self._opened = True

    def read(self, count: int, block_s: float = 0.0) -> list[Entry]:
        """Up to `count` entries not yet given out: failed ones, pending ones of an earlier life, then new ones.

        Waits up to `block_s` seconds for the first; an empty list means there was none. Raises `Unavailable` when
        Redis stays away longer than the retry time.
        """
        if not self._opened:
            self.open()
        deadline = time.monotonic() + block_s
        while True:
            entries = self._decode(self._read_raw(count, deadline))
            if entries or time.monotonic() >= deadline:
                return entries

    def ack(self, ids: Sequence[str]) -> None:
        """Forget entries for good: their effect is durable. Acknowledging twice is harmless."""
        if ids:
            self._call(lambda: self._finish(ids, None))

    def fail(self, entry: Entry, reason: str) -> bool:
        """Count a failure to use the entry (a missing or damaged blob). The entry is given out again by `read`.

        The third failure moves it to `hw:{run}:dead` and acknowledges it; then the result is True, and the caller
        frees whatever the group holds.
        """
        data = entry.group.SerializeToString()
        return self._count_failure(entry.id, entry.group.group_id.encode(), data, reason)

    def take_dead_group_ids(self) -> list[str]:
        """Groups that died inside `read` since the last call; the caller frees their budget."""
        died, self._died = self._died, []
        return died

    def dead(self, count: int = 100) -> list[DeadEntry]:
        """The newest groups that were given up."""
        rows = self._call(lambda: self._redis.xrevrange(self.keys.dead, count=count))
        return [DeadEntry(f[b"entry"].decode(), f[b"group"].decode(), f[b"reason"].decode()) for _, f in rows]

    def pending(self) -> int:
        """Entries that were given out and not acknowledged."""
        summary = self._call(lambda: self._redis.xpending(self.keys.scored, CONSUMER_GROUP))
        return int(summary["pending"])

    def length(self) -> int:
        """Entries in the stream: pending and unread ones (acknowledged ones are deleted)."""
        return int(self._call(lambda: self._redis.xlen(self.keys.scored)))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _create_group(self) -> None:
        try:
            self._redis.xgroup_create(self.keys.scored, CONSUMER_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _read_raw(self, count: int, deadline: float) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
        if self._retry:
            ids, self._retry = self._retry[:count], self._retry[count:]
            return [self._call(partial(self._reread, entry_id)) for entry_id in ids]
        return self._call(lambda: self._read_group(count, deadline))

    def _reread(self, entry_id: str) -> tuple[bytes, dict[bytes, bytes] | None]:
        found = self._redis.xrange(self.keys.scored, entry_id, entry_id)
        return found[0] if found else (entry_id.encode(), None)

    def _read_group(self, count: int, deadline: float) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
        while self._pending_cursor is not None:
            rows = self._xreadgroup(count, self._pending_cursor, None)
            self._pending_cursor = rows[-1][0].decode() if rows else None
            fresh = [row for row in rows if row[0].decode() not in self._delivered]
            if fresh:
                return fresh
        wait_s = min(max(0.0, deadline - time.monotonic()), _BLOCK_SLICE_S, self._timeouts.command_s / 2)
        return self._xreadgroup(count, ">", max(1, int(wait_s * 1000)) if wait_s > 0 else None)

    def _xreadgroup(self, count: int, start: str, block_ms: int | None) -> list[Any]:
        streams = {self.keys.scored: start}
        reply = self._redis.xreadgroup(CONSUMER_GROUP, self._consumer, streams, count=count, block=block_ms)
        return list(reply[0][1]) if reply else []

    def _decode(self, rows: Sequence[tuple[bytes, dict[bytes, bytes] | None]]) -> list[Entry]:
        entries = []
        for raw_id, fields in rows:
            entry_id, fields = raw_id.decode(), fields or {}
            self._delivered.add(entry_id)
            try:
                if b"data" not in fields:
                    raise DecodeError("the entry has no data: it was deleted or trimmed by somebody else")
                entries.append(Entry(entry_id, ScoredGroup.FromString(fields[b"data"])))
            except DecodeError as error:
                group = fields.get(b"group", b"")
                if self._count_failure(entry_id, group, fields.get(b"data", b""), f"cannot be decoded: {error}"):
                    self._died.append(group.decode(errors="replace"))
        return entries

    def _count_failure(self, entry_id: str, group: bytes, data: bytes, reason: str) -> bool:
        failures = self._call(lambda: self._redis.hincrby(self.keys.failures, entry_id, 1))
        if failures < MAX_FAILURES:
            self._retry.append(entry_id)
            return False
        dead = {"group": group, "data": data, "reason": reason[:1000], "entry": entry_id}
        self._call(lambda: self._finish([entry_id], dead))
        return True

    def _finish(self, ids: Sequence[str], dead: dict[str, Any] | None) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            if dead is not None:
                pipe.xadd(self.keys.dead, dead)
            pipe.xack(self.keys.scored, CONSUMER_GROUP, *ids)
            pipe.xdel(self.keys.scored, *ids)
            pipe.hdel(self.keys.failures, *ids)
            pipe.execute()
        self._delivered.difference_update(ids)

    def _call(self, command: Callable[[], _T]) -> _T:
        """Run a command; on a lost connection try again with backoff until the retry time is over."""
        deadline, delay = time.monotonic() + self._timeouts.retry_s, 0.1
        while True:
            try:
                return command()
            except RETRYABLE as error:
                self._pending_cursor = "0"  # a reply may have been lost: its entries are pending, read them again
                if time.monotonic() + delay > deadline:
                    raise explain(error, self._url) from error
                time.sleep(delay)
                delay = min(2.0, delay * 2)
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise explain(error, self._url) from error
                with suppress(*RETRYABLE):  # Redis came back without its data
                    self._create_group()
            except RedisError as error:
                raise explain(error, self._url) from error
