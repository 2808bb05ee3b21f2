"""A circuit breaker: a server that answers but fails to score, again and again, is left alone for a while."""

import time
from collections.abc import Callable, Iterable

THRESHOLD = 3  # failures in a row that open it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0


class CircuitBreaker:
    """One circuit per key.

    Open after `THRESHOLD` failures in a row; after a pause one trial is let through: success closes it, failure doubles
    the pause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._open_until: dict[str, float] = {}

    def closed(self, keys: Iterable[str]) -> list[str]:
        """Those that may be called now."""
        now = self._clock()
        return [key for key in keys if self._open_until.get(key, 0.0) <= now]

    def wait_s(self, keys: Iterable[str]) -> float:
        """Seconds until the first of them may be called."""
        return max(0.0, min(self._open_until.get(key, 0.0) for key in keys) - self._clock())

    def calls(self, key: str) -> None:
        """A call starts. The trial of an open circuit keeps the others away until it has ended or a pause is over."""
        if self._failures.get(key, 0) >= THRESHOLD:
            self._open_until[key] = self._clock() + self._pause_s(key)

    def succeeded(self, key: str) -> None:
        """The call has worked."""
        self._failures.pop(key, None)
        self._open_until.pop(key, None)

    def failed(self, key: str) -> None:
        """The call has failed, and not because of its content."""
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] >= THRESHOLD:
            self._open_until[key] = self._clock() + self._pause_s(key)

    def _pause_s(self, key: str) -> float:
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(10, self._failures[key] - THRESHOLD))
