"""Advantages of grouped rewards (GRPO as in Flow-GRPO, arXiv 2505.05470; GDPO, arXiv 2601.05242). fp64, no torch."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPS = 1e-4
Array = NDArray[np.float64]


@dataclass(frozen=True)
class AdvantageRule:
    """How rewards become advantages."""

    std_normalization: bool = True  # divide by a standard deviation
    global_std: bool = False  # of the whole batch instead of the group
    ddof: int = 0  # 0: population std, 1: sample std
    combine: Literal["weighted_sum", "gdpo"] = "weighted_sum"


def combined_advantages(
    rewards: Mapping[str, ArrayLike], weights: Mapping[str, float], groups: Sequence[Hashable], rule: AdvantageRule
) -> Array:
    """Advantages [N] of N samples from several rewards, each [N]; `groups` [N] names the group of each sample.

    "weighted_sum" adds the raw rewards by weight and normalises the sum. "gdpo" normalises each reward in its group,
    adds by weight and normalises over the batch, so that no reward drowns another by its scale.
    Raises ValueError for a reward that is not finite, of another length, or without a weight.
    """
    if not rewards:
        raise ValueError("no rewards; an advantage needs at least one reward with role train")
    if missing := sorted(set(rewards) - set(weights)):
        raise ValueError(f"reward {missing[0]!r} has no weight")
    values = {name: _checked(name, value, len(groups)) for name, value in rewards.items()}
    if rule.combine == "weighted_sum":
        return advantages(sum(weights[name] * value for name, value in values.items()), groups, rule)
    if rule.combine == "gdpo":
        in_group = AdvantageRule(ddof=rule.ddof)
        total = sum(weights[name] * advantages(value, groups, in_group) for name, value in values.items())
        return advantages(total, [0] * len(groups), in_group)
    raise ValueError(f"combine is {rule.combine!r}; use 'weighted_sum' or 'gdpo'")


def advantages(rewards: ArrayLike, groups: Sequence[Hashable], rule: AdvantageRule = AdvantageRule()) -> Array:
    """(r - mean of the group) / (std + 1e-4), [N], for rewards [N] in any order.

    A group of one sample is not divided. Raises ValueError for a reward that is not finite.
    """
    values = _checked("reward", rewards, len(groups))
    whole_std = _std(values, rule.ddof)
    result = np.zeros_like(values)
    for members in _members(groups).values():
        own = values[members]
        centred = own - own.mean()
        if rule.std_normalization and len(members) > 1:
            centred = centred / ((whole_std if rule.global_std else _std(own, rule.ddof)) + EPS)
        result[members] = centred
    return result


def zero_variance_share(rewards: ArrayLike, groups: Sequence[Hashable]) -> float:
    """Share of groups, in [0, 1], whose rewards [N] are all equal and which therefore teach nothing."""
    values = _checked("reward", rewards, len(groups))
    members = list(_members(groups).values())
    return sum(float(np.ptp(values[index])) == 0.0 for index in members) / len(members) if members else 0.0


def _members(groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return members


def _std(values: Array, ddof: int) -> float:
    return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0


def _checked(name: str, values: ArrayLike, count: int) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (count,):
        raise ValueError(f"{name} has shape {array.shape}; it must be one value for each of the {count} samples")
    if len(bad := np.flatnonzero(~np.isfinite(array))):
        raise ValueError(f"{name} of sample {bad[0]} is {array[bad[0]]}; a reward must be finite or an error")
    return array
