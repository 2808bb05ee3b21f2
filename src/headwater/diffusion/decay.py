"""Decay schedules of averaged weights: the share of the old average that is left when the new weights are taken in."""

from collections.abc import Mapping

# DiffusionNFT (arXiv 2509.16117), decay types 0, 1 and 2: updates without decay, increase per update, highest decay.
OLD_POLICY_DECAYS: Mapping[str, tuple[int, float, float]] = {
    "zero": (0, 0.0, 0.0),
    "ramp": (0, 0.001, 0.5),
    "late_ramp": (75, 0.0075, 0.999),
}


def ema_decay(updates: int, max_decay: float) -> float:
    """Decay after `updates` optimizer updates: min((1 + n) / (10 + n), max_decay)."""
    return min((1 + updates) / (10 + updates), max_decay)


def old_policy_decay(schedule: str, updates: int) -> float:
    """Decay of the old policy of DiffusionNFT after `updates` optimizer updates.

    "zero": always 0, the old policy is the trained one; "ramp": min(0.001 n, 0.5); "late_ramp": 0 for the first 75
    updates, then min(0.0075 (n - 75), 0.999). Raises KeyError for another schedule.
    """
    flat, rate, highest = OLD_POLICY_DECAYS[schedule]
    return 0.0 if updates < flat else min((updates - flat) * rate, highest)
