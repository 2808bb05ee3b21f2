"""Names of a run's keys in Redis, and the rule for run and group ids."""

import re
from dataclasses import dataclass

from headwater.errors import InvalidArgument

CONSUMER_GROUP = "trainer"
MAX_ENTRY_BYTES = 64 * 1024
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_id(value: str, *, field: str) -> str:
    """Return a run or group id; raise `InvalidArgument` when it could not name a key and a file."""
    if not _ID.fullmatch(value):
        raise InvalidArgument(
            f"{field} is {value[:200]!r}; it must be 1 to 128 letters, digits and ._- and start with a letter or digit",
            field=field,
        )
    return value


@dataclass(frozen=True)
class RunKeys:
    """The Redis keys of one run."""

    run_id: str

    def __post_init__(self) -> None:
        check_id(self.run_id, field="run_id")

    @property
    def scored(self) -> str:
        """Stream of scored groups; fields `group` (id) and `data` (serialised ScoredGroup)."""
        return f"hw:{self.run_id}:scored"

    @property
    def groups(self) -> str:
        """Hash group id -> token of the attempt that published it: what makes publishing idempotent."""
        return f"hw:{self.run_id}:groups"

    @property
    def failures(self) -> str:
        """Hash stream id -> number of failed decodings."""
        return f"hw:{self.run_id}:failures"

    @property
    def dead(self) -> str:
        """Stream of groups that were given up; fields `group`, `data`, `reason`, `entry` (stream id)."""
        return f"hw:{self.run_id}:dead"
