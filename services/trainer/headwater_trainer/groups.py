"""Where groups come from. Every rank asks its `GroupSource`; rank 0 reads them and shares them with the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater_trainer.ranks import Ranks, RunFailed


class Signal(Enum):
    """What `take` may answer instead of groups."""

    STOP = "stop"  # end the run
    SAVE = "save"  # write a checkpoint, then ask again
    WAIT = "wait"  # nothing yet, ask again


@dataclass(frozen=True)
class GroupBatch:
    """The groups of one step, and how many the filters had dropped since the last."""

    groups: Sequence[ScoredGroup]
    dropped: int = 0


@dataclass
class Cursor:
    """What a checkpoint must hold to continue with the data: all of it plain numbers and strings."""

    next_sequence: int = 0  # of the next group to be submitted
    outstanding: list[int] = field(default_factory=list)  # submitted, neither trained nor dropped
    consumed: list[str] = field(default_factory=list)  # trained and not acknowledged to the stream yet

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"next_sequence": self.next_sequence, "outstanding": self.outstanding, "consumed": self.consumed}


class GroupSource(Protocol):
    """A source of scored groups. Exists on rank 0 only, apart from `SharedSource`."""

    def take(self, step: int) -> GroupBatch | Signal:
        """The groups to train in the step after `step` steps, or a signal. Returns within a few seconds."""
        ...

    def fail(self, group_id: str, reason: str) -> None:
        """A group of the last batch could not be used."""
        ...

    def trained(self, step: int) -> None:
        """The last batch is trained, `step` steps are done and their weights published: make room for others."""
        ...

    def cursor(self) -> Cursor:
        """What a checkpoint taken now must hold."""
        ...

    def settle(self) -> None:
        """A checkpoint that holds everything trained until now is durable: forget it."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


_KINDS = {Signal.STOP: b"s", Signal.SAVE: b"c", Signal.WAIT: b"w"}


class SharedSource:
    """Rank 0's source, seen by all ranks: each call is made by every rank together."""

    def __init__(self, inner: GroupSource | None, ranks: Ranks) -> None:
        """`inner` is given on rank 0 only."""
        assert (inner is not None) == ranks.is_first
        self._inner = inner
        self._ranks = ranks

    def take(self, step: int) -> GroupBatch | Signal:
        """The same groups, or signal other than WAIT, on every rank. Raises `RunFailed` on all when rank 0 fails."""
        while True:
            message = self._ranks.broadcast(self._encoded(step) if self._inner is not None else None)
            result = _decode(message)
            if result is not Signal.WAIT:
                return result

    def fail(self, group_id: str, reason: str) -> None:
        """See `GroupSource`."""
        if self._inner is not None:
            self._inner.fail(group_id, reason)

    def trained(self, step: int) -> None:
        """See `GroupSource`."""
        if self._inner is not None:
            self._inner.trained(step)

    def cursor(self) -> Cursor:
        """See `GroupSource`; empty on other ranks, which do not write it."""
        return self._inner.cursor() if self._inner is not None else Cursor()

    def settle(self) -> None:
        """See `GroupSource`."""
        if self._inner is not None:
            self._inner.settle()

    def close(self) -> None:
        """See `GroupSource`."""
        if self._inner is not None:
            self._inner.close()

    def _encoded(self, step: int) -> bytes:
        assert self._inner is not None
        try:
            result = self._inner.take(step)
        except Exception as error:  # the other ranks wait: whatever it is, they must hear of it
            return b"e" + str(getattr(error, "message", error)).encode()
        if isinstance(result, Signal):
            return _KINDS[result]
        parts = [result.dropped.to_bytes(8, "big")]
        for group in result.groups:
            data = group.SerializeToString()
            parts += [len(data).to_bytes(8, "big"), data]
        return b"g" + b"".join(parts)


def _decode(message: bytes) -> GroupBatch | Signal:
    kind, body = message[:1], message[1:]
    if kind == b"e":
        raise RunFailed(body.decode(errors="replace"))
    for signal, code in _KINDS.items():
        if kind == code:
            return signal
    groups, position = [], 8
    while position < len(body):
        size = int.from_bytes(body[position : position + 8], "big")
        groups.append(ScoredGroup.FromString(body[position + 8 : position + 8 + size]))
        position += 8 + size
    return GroupBatch(groups, dropped=int.from_bytes(body[:8], "big"))
