"""What the failure policies of rewards mean, and what counts as a score."""

import math
from collections.abc import Sequence

from headwater.common.v1.reward_pb2 import RewardFailurePolicy, RewardRole, RewardScore, RewardSpec
from headwater.common.v1.sample_pb2 import Media, Sample
from headwater.errors import HeadwaterError, Internal, NotFound, from_item_error, to_item_error
from headwater.reward.v1.reward_pb2 import ScoreGroupResponse

MAX_CALL_MEDIA_BYTES = 7 * 1024 * 1024  # a message has at most 8 MiB
POLICY = RewardFailurePolicy

Scores = list[RewardScore]  # of one reward, one per sample


class GroupDropped(Exception):
    """A reward with policy DROP_GROUP failed: the group counts as filtered."""

    def __init__(self, reward: str, error: HeadwaterError) -> None:
        super().__init__(error.message)
        self.reward = reward


def policy_of(spec: RewardSpec) -> "RewardFailurePolicy.ValueType":
    """The policy of a reward: DROP_REWARD for a MONITOR, which never stops a run, else as given, else RETRY."""
    if spec.role == RewardRole.REWARD_ROLE_MONITOR:
        return POLICY.REWARD_FAILURE_POLICY_DROP_REWARD
    if spec.failure_policy != POLICY.REWARD_FAILURE_POLICY_UNSPECIFIED:
        return spec.failure_policy
    return POLICY.REWARD_FAILURE_POLICY_RETRY


def parts_of(media: Sequence[Media]) -> list[list[Media]]:
    """Media in order, cut so that each part fits a message."""
    parts: list[list[Media]] = []
    size = 0
    for item in media:
        size += item.ByteSize()
        if not parts or size > MAX_CALL_MEDIA_BYTES:
            parts.append([])
            size = item.ByteSize()
        parts[-1].append(item)
    return parts


def read_scores(response: ScoreGroupResponse, spec: RewardSpec, count: int) -> Scores:
    """The scores of one reward. Raises the first sample's error unless the reward may be dropped."""
    if len(response.samples) != count or any(len(sample.scores) != 1 for sample in response.samples):
        raise Internal(f"reward {spec.name!r}: the server answered with other samples or rewards than it was asked for")
    scores = [_finite(sample.scores[0], spec.name) for sample in response.samples]
    if policy_of(spec) != POLICY.REWARD_FAILURE_POLICY_DROP_REWARD:
        for score in scores:
            if score.WhichOneof("outcome") == "error":
                raise from_item_error(score.error)
    return scores


def _finite(score: RewardScore, name: str) -> RewardScore:
    if score.name != name or score.WhichOneof("outcome") is None:
        problem = Internal(f"reward {name!r}: the server answered with neither a value nor an error")
    elif score.WhichOneof("outcome") == "value" and not math.isfinite(score.value):
        problem = Internal(f"reward {name!r} is {score.value}; scores must be finite", reason="REWARD_NOT_FINITE")
    else:
        return score
    return RewardScore(name=name, error=to_item_error(problem))


def unknown_reward(missing: set[str], specs: Sequence[RewardSpec], known: set[str]) -> NotFound:
    """The error for rewards that no server hosts."""
    index, name = next((i, spec.name) for i, spec in enumerate(specs) if spec.name in missing)
    return NotFound(
        f"no reward server hosts {name!r}; known rewards are {', '.join(sorted(known)) or 'none'}",
        field=f"rewards[{index}].name",
        reason="REWARD_UNKNOWN",
    )


def set_total(sample: Sample, specs: Sequence[RewardSpec]) -> None:
    """Set total_reward to the weighted sum of the TRAIN rewards; leave it unset when one is missing or none exists."""
    total, found = 0.0, False
    values = {score.name: score.value for score in sample.rewards if score.WhichOneof("outcome") == "value"}
    for spec in specs:
        if spec.role == RewardRole.REWARD_ROLE_MONITOR:
            continue
        if spec.name not in values:
            return
        total += (spec.weight if spec.HasField("weight") else 1.0) * values[spec.name]
        found = True
    if found:
        sample.total_reward = total
