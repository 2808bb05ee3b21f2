"""Rank 0's source of groups in a run: the stream, fed through the router."""

import logging
import time
from collections.abc import Callable

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import Recipe
from headwater.errors import DeadlineExceeded, Unavailable
from headwater.stream.scored import Entry, ScoredStream
from headwater.tensors.blobs import BlobStore
from headwater_trainer.background import BackgroundLoop
from headwater_trainer.feeder import Feeder
from headwater_trainer.groups import Cursor, GroupBatch, Signal
from headwater_trainer.prompt_order import group_id_of, sequence_of

log = logging.getLogger(__name__)

_READ_COUNT = 256
_CALL_TIMEOUT_S = 15.0
_MISSING_AFTER_S = 60.0


class StreamSource:
    """Reads scored groups, hands them out in batches, and acknowledges them once a checkpoint holds their effect."""

    def __init__(
        self,
        recipe: Recipe,
        run_id: str,
        stream: ScoredStream,
        store: BlobStore,
        feeder: Feeder,
        background: BackgroundLoop,
        *,
        asked: Callable[[], Signal | None],
        idle: Callable[[], None],
        notice: Callable[[str, str], None],
        wait_limit_s: float,
        unwanted: Callable[[ScoredGroup], str] | None = None,
    ) -> None:
        """`asked` says what clients want, `idle` is called about once a second while there is nothing to do.

        `unwanted` says why a group that arrived is to be replaced, or "".
        """
        self._unwanted = unwanted
        self._recipe = recipe
        self._run_id = run_id
        self._stream = stream
        self._store = store
        self._feeder = feeder
        self._background = background
        self._asked = asked
        self._idle = idle
        self._notice = notice
        self._wait_limit_s = wait_limit_s
        self._ready: dict[int, Entry] = {}  # read, not handed out
        self._batch: dict[int, Entry] = {}  # handed out last
        self._unacknowledged: dict[int, Entry] = {}  # trained
        self._missing_since: dict[int, float] = {}  # published by word of the router, not read from the stream yet
        self._step = 0
        self._dropped_told = 0
        self._waiting_since = time.monotonic()

    def start(self, step: int, cursor: Cursor) -> None:
        """Read what is in the stream already, then feed. Raises `Unavailable` when Redis does not answer."""
        self._step = step
        self._stream.open()
        consumed = {sequence_of(group_id) for group_id in cursor.consumed}
        seen: set[int] = set()
        while entries := self._stream.read(_READ_COUNT):
            seen |= {sequence_of(entry.group.group_id) for entry in entries}
            self._accept(entries)
        self._forget({number: self._ready.pop(number) for number in consumed & self._ready.keys()})
        gone = consumed | (seen - self._ready.keys()) | {sequence_of(dead.group_id) for dead in self._stream.dead()}
        self._feeder.resume(step, cursor.next_sequence, set(cursor.outstanding) - gone, self._ready.keys())
        self._background.call(self._feeder.start(), _CALL_TIMEOUT_S)

    def take(self, step: int) -> GroupBatch | Signal:
        """A full batch ordered by group number, or a signal; WAIT after at most a few seconds."""
        self._step = step
        if (asked := self._asked()) is not None:
            return asked
        if self._feeder.failure is not None:
            raise self._feeder.failure
        chosen = self._choose()
        if chosen is None:
            self._idle()
            self._check_patience()
            self._read()
            self._replace_missing()
            chosen = self._choose()
        if chosen is None:
            return Signal.WAIT
        self._batch = {number: self._ready.pop(number) for number in chosen}
        dropped = self._feeder.standing.dropped_total - self._dropped_told
        self._dropped_told += dropped
        return GroupBatch([self._batch[number].group for number in chosen], dropped=dropped)

    def _choose(self) -> list[int] | None:
        """The numbers of the next batch. In deterministic mode none with a smaller number may still come."""
        count = self._recipe.train.groups_per_step
        if len(self._ready) < count:
            return None
        if not self._recipe.run.deterministic:
            return sorted(list(self._ready)[:count])
        chosen = sorted(self._ready)[:count]
        standing = self._feeder.standing
        expected = (standing.in_flight | standing.published) - self._ready.keys()
        return None if any(number < chosen[-1] for number in expected) else chosen

    def _read(self) -> None:
        try:
            self._accept(self._stream.read(_READ_COUNT, block_s=1.0))
        except Unavailable as error:  # Redis may come back; the wait limit ends it
            self._notice(error.reason, error.message)
        if dead := self._stream.take_dead_group_ids():
            self._give_up(dead, "it could not be decoded")

    def _accept(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._waiting_since = time.monotonic()
            number = sequence_of(entry.group.group_id)
            reason = self._stale(entry.group) or (self._unwanted(entry.group) if self._unwanted else "")
            if reason:
                self._forget({number: entry})
                self._give_up([entry.group.group_id], reason)
            elif number not in self._batch and number not in self._unacknowledged:
                self._ready[number] = entry

    def _stale(self, group: ScoredGroup) -> str:
        version = group.samples[0].first_step_version if group.samples else None
        if version is None or version.run_id != self._run_id:
            return f"it was made by weights of {version.run_id if version else '?'!r}, not of this run"
        age, bound = self._step - version.step, self._recipe.train.staleness_bound
        return f"its weights are {age} steps old; the bound is {bound}" if age > bound else ""

    def _replace_missing(self) -> None:
        """Give up groups that were published and do not come: Redis lost its data, or somebody trimmed the stream."""
        now = time.monotonic()
        missing = self._feeder.standing.published - self._ready.keys() - self._batch.keys()
        self._missing_since = {number: self._missing_since.get(number, now) for number in missing}
        if lost := [number for number, since in self._missing_since.items() if now - since > _MISSING_AFTER_S]:
            self._give_up([group_id_of(number) for number in lost], "published, but not in the stream")

    def _give_up(self, group_ids: list[str], reason: str) -> None:
        self._notice("GROUP_GIVEN_UP", f"{', '.join(group_ids)}: {reason}; replaced")
        self._release(group_ids, self._step)

    def fail(self, group_id: str, reason: str) -> None:
        """Count a failure; the stream gives the group out again, or lays it aside for good."""
        number = sequence_of(group_id)
        entry = self._batch.pop(number)
        if self._stream.fail(entry, reason):
            self._give_up([group_id], f"laid aside after repeated failures: {reason}")

    def trained(self, step: int) -> None:
        """Free the slots of the last batch; its entries stay pending until `settle`."""
        self._unacknowledged.update(self._batch)
        released = [group_id_of(number) for number in self._batch]
        self._batch = {}
        self._waiting_since = time.monotonic()
        self._release(released, step)

    def cursor(self) -> Cursor:
        """Groups in flight or in the stream are outstanding; trained ones are consumed."""
        standing = self._feeder.standing
        consumed = [group_id_of(number) for number in sorted(self._unacknowledged)]
        return Cursor(standing.next_sequence, sorted(standing.charged), consumed)

    def settle(self) -> None:
        """Acknowledge what the durable checkpoint holds, and delete its blobs."""
        self._forget(self._unacknowledged)
        self._unacknowledged = {}

    def close(self) -> None:
        """Stop feeding and close the stream."""
        self._background.call(self._feeder.stop(), _CALL_TIMEOUT_S)
        self._stream.close()

    def _forget(self, entries: dict[int, Entry]) -> None:
        self._stream.ack([entry.id for entry in entries.values()])
        for entry in entries.values():
            for uri in blob_uris(entry.group):
                self._store.delete(uri)

    def _release(self, group_ids: list[str], step: int) -> None:
        self._background.call(self._feeder.release(group_ids, step), _CALL_TIMEOUT_S)

    def _check_patience(self) -> None:
        waited = time.monotonic() - self._waiting_since
        if waited > self._wait_limit_s:
            raise DeadlineExceeded(
                f"no group has arrived for {waited:.0f} s; `headwater status` shows what the workers do",
                reason="NO_GROUPS",
            )


def blob_uris(group: ScoredGroup) -> set[str]:
    """The blobs that a group refers to."""
    tensors = [
        item.tensor for conditioning in group.conditionings for item in (*conditioning.positive, *conditioning.negative)
    ]
    uris = set()
    for sample in group.samples:
        trajectory = sample.trajectory
        tensors += [trajectory.latents, trajectory.timesteps, trajectory.sigmas, trajectory.log_probs]
        tensors += [item.tensor for item in trajectory.debug]
        uris |= {sample.media.blob.uri, sample.media.tensor.blob.uri}
    return (uris | {tensor.blob.uri for tensor in tensors}) - {""}
