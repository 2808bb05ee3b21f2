"""Decay schedules of averaged weights."""


def ema_decay(updates: int, max_decay: float) -> float:
    """Share of the old average that `updates` optimizer updates leave: min((1 + n) / (10 + n), max_decay)."""
    return min((1 + updates) / (10 + updates), max_decay)
