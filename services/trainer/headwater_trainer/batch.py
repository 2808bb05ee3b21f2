"""The groups of one step: who trains what, rewards, advantages, and the figures that need no model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.common.v1.reward_pb2 import RewardRole, RewardScore
from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import Recipe
from headwater.diffusion.advantages import AdvantageRule, combined_advantages, zero_variance_share
from headwater.errors import DataLoss, HeadwaterError
from headwater_trainer.pairs import TrainPair
from headwater_trainer.ranks import Ranks

Groups = Sequence[ScoredGroup]
PairsOf = Callable[[ScoredGroup, Sequence[int]], Sequence[TrainPair]]  # of the samples at some indices of a group


@dataclass
class LoadedBatch:
    """What this rank trains on. `groups` and the number of `shares` are the same on every rank."""

    groups: Groups  # the usable ones, in order
    shares: list[list[TrainPair]]  # this rank's pairs of each optimizer update
    filler: TrainPair | None  # a pair of anybody's, for a rank that has none; None without usable groups


def load_batch(
    groups: Groups, update_count: int, pairs_of: PairsOf, ranks: Ranks, unusable: Callable[[str, str], None]
) -> LoadedBatch:
    """Read this rank's part: of each update's groups, a contiguous share of the samples.

    A group that any rank cannot use is left out on all ranks; `unusable(group_id, reason)` is told.
    """
    pairs: dict[str, Sequence[TrainPair]] = {}
    reasons = [""] * len(groups)
    for g, (group, indices) in enumerate(zip(groups, _own_samples(groups, update_count, ranks), strict=True)):
        try:
            train_rewards(group)
            pairs[group.group_id] = pairs_of(group, indices)
        except HeadwaterError as error:
            reasons[g] = error.message
    failed = ranks.largest([float(bool(reason)) for reason in reasons])
    for group, bad, reason in zip(groups, failed, reasons, strict=True):
        if bad:
            unusable(group.group_id, reason or "another rank could not read it")
    usable = [group for group, bad in zip(groups, failed, strict=True) if not bad]
    split = split_groups(usable, update_count)
    shares = [[pair for group in part for pair in pairs[group.group_id]] for part in split]
    filler = ranks.together("read a sample", lambda: _filler(usable, shares, pairs_of))
    return LoadedBatch(usable, shares, filler)


def split_groups(groups: Groups, update_count: int) -> list[Groups]:
    """The groups of each optimizer update: `update_count` parts of nearly equal size, none empty."""
    count = min(update_count, len(groups))
    return [groups[len(groups) * i // count : len(groups) * (i + 1) // count] for i in range(count)]


def _own_samples(groups: Groups, update_count: int, ranks: Ranks) -> list[list[int]]:
    """For each group the indices of the samples that this rank trains on."""
    own: list[list[int]] = []
    for part in split_groups(groups, update_count):
        total, position = sum(len(group.samples) for group in part), 0
        begin, end = (total * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
        for group in part:
            own.append([i for i in range(len(group.samples)) if begin <= position + i < end])
            position += len(group.samples)
    return own


def _filler(usable: Groups, shares: Sequence[Sequence[TrainPair]], pairs_of: PairsOf) -> TrainPair | None:
    if not usable:
        return None
    return (
        next((pair for share in shares for pair in share), None)
        or pairs_of(usable[0], range(len(usable[0].samples)))[0]
    )


def train_rewards(group: ScoredGroup) -> dict[str, list[float]]:
    """The rewards of role TRAIN by name, one value per sample. Raises `DataLoss` for one missing or not finite."""
    names = [spec.name for spec in group.reward_specs if spec.role != RewardRole.REWARD_ROLE_MONITOR]
    return {name: [_value(group, index, name) for index in range(len(group.samples))] for name in names}


def _value(group: ScoredGroup, index: int, name: str) -> float:
    score = next((score for score in group.samples[index].rewards if score.name == name), RewardScore())
    if not _is_finite(score):
        found = score.error.message or (f"is {score.value}" if score.name else "is missing")
        raise DataLoss(f"reward {name!r} of sample {index}: {found}", reason="REWARD_UNUSABLE")
    return score.value


def _is_finite(score: RewardScore) -> bool:
    return score.WhichOneof("outcome") == "value" and math.isfinite(score.value)


def assign_advantages(batch: LoadedBatch, recipe: Recipe) -> None:
    """Fill in the advantage of every pair from the rewards of the whole batch."""
    section = recipe.objective
    rule = AdvantageRule(section.std_normalization, section.global_std, section.ddof, section.combine)
    rewards, samples = _rewards(batch.groups)
    weights = {reward.name: reward.weight for reward in recipe.rewards}
    found = combined_advantages(rewards, weights, [group_id for group_id, _ in samples], rule)
    by_sample = dict(zip(samples, found.tolist(), strict=True))
    for share in batch.shares:
        for pair in share:
            pair.advantage = by_sample[pair.group_id, pair.sample_index]


def _rewards(groups: Groups) -> tuple[dict[str, list[float]], list[tuple[str, int]]]:
    """TRAIN rewards by name, and (group id, index) of each sample, over all samples in order."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        for name, values in train_rewards(group).items():
            rewards.setdefault(name, []).extend(values)
    return rewards, [(group.group_id, index) for group in groups for index in range(len(group.samples))]


def describe(groups: Groups, dropped: int, step: int, recipe: Recipe) -> Mapping[str, float]:
    """Rewards, variance, staleness and counts of a step's groups; `step` is the number of steps done before it."""
    images = sum(len(group.samples) for group in groups)
    values = {"groups": float(len(groups)), "images": float(images), "groups/dropped": float(dropped)}
    if not groups:
        return values
    rewards, samples = _rewards(groups)
    weights = {reward.name: reward.weight for reward in recipe.rewards}
    combined = np.sum([weights[name] * np.asarray(each) for name, each in rewards.items()], axis=0)
    values["reward/mean"], values["reward/std"] = float(combined.mean()), float(combined.std())
    for name in weights:
        scores = [s.value for g in groups for x in g.samples for s in x.rewards if s.name == name and _is_finite(s)]
        if scores:
            values[f"reward/{name}/mean"] = sum(scores) / len(scores)
    flat = zero_variance_share(combined, [group_id for group_id, _ in samples]) * len(groups)
    values["zero_variance/share"] = (flat + dropped) / (len(groups) + dropped)
    ages = [max(0, step - sample.first_step_version.step) for group in groups for sample in group.samples]
    values["staleness/mean"], values["staleness/max"] = sum(ages) / len(ages), float(max(ages))
    for age in range(recipe.train.staleness_bound + 1):
        values[f"staleness/share_{age}"] = ages.count(age) / len(ages)
    return values
