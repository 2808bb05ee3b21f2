"""Filters decide whether a scored group is worth training on. One function each, looked up by name."""

from collections.abc import Callable, Mapping, Sequence

from headwater.common.v1.reward_pb2 import RewardRole, RewardSpec
from headwater.common.v1.sample_pb2 import FilterDecision, FilterVerdict, Sample
from headwater.errors import InvalidArgument

# A filter takes the samples of a group and returns why it should be dropped; empty keeps it.
Filter = Callable[[Sequence[Sample]], str]


def zero_variance(samples: Sequence[Sample]) -> str:
    """Drop a group whose samples all have the same total reward: every advantage would be zero."""
    totals = [sample.total_reward for sample in samples]
    spread = max(totals) - min(totals)
    if spread > 1e-8 * max(1.0, *(abs(total) for total in totals)):
        return ""
    return f"all {len(totals)} samples have the total reward {totals[0]:g}"


FILTERS: Mapping[str, Filter] = {"zero_variance": zero_variance}


def check(names: Sequence[str], rewards: Sequence[RewardSpec]) -> None:
    """Raise `InvalidArgument` for an unknown filter, or one that has nothing to look at."""
    for index, name in enumerate(names):
        if name not in FILTERS:
            raise InvalidArgument(
                f"filters[{index}] is {name!r}; known filters are {', '.join(sorted(FILTERS))}",
                field=f"filters[{index}]",
                reason="FILTER_UNKNOWN",
            )
        if all(spec.role == RewardRole.REWARD_ROLE_MONITOR for spec in rewards):
            raise InvalidArgument(
                f"filter {name!r} looks at the total reward, and the group asks for no TRAIN reward; add one",
                field=f"filters[{index}]",
                reason="FILTER_NEEDS_REWARD",
            )


def decide(names: Sequence[str], samples: Sequence[Sample]) -> FilterDecision:
    """Apply filters in order; the first that objects drops the group."""
    for name in names:
        detail = FILTERS[name](samples)
        if detail:
            return FilterDecision(verdict=FilterVerdict.FILTER_VERDICT_DROPPED, filter=name, detail=detail)
    return FilterDecision(verdict=FilterVerdict.FILTER_VERDICT_KEPT)
