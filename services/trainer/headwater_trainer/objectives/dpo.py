"""Diffusion-DPO (arXiv 2311.12908), online: prefer the best samples of a group to the worst."""

from collections.abc import Sequence

import torch

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import Recipe
from headwater.diffusion.losses import dpo_loss, mean_per_sample
from headwater.errors import DataLoss
from headwater.tensors.codec import Fetch
from headwater_trainer import preference_pairs
from headwater_trainer.batch import train_rewards
from headwater_trainer.model import Policy
from headwater_trainer.objectives.base import Objective
from headwater_trainer.objectives.terms import Terms
from headwater_trainer.preference_pairs import PreferenceBatch, PreferencePair, ranked


class Dpo(Objective[PreferencePair, PreferenceBatch]):
    """The `dpo` objective. It needs final latents only, whatever sampled them, and takes samples of any age."""

    def __init__(self, recipe: Recipe) -> None:
        self._section = recipe.objective
        self._seed = recipe.run.seed
        self._level_count = recipe.levels_per_sample
        self._weights = {reward.name: reward.weight for reward in recipe.rewards}

    def pairs(self, group: ScoredGroup, indices: Sequence[int], fetch: Fetch, step: int) -> list[PreferencePair]:
        """Those pairs of the group whose preferred sample is at `indices`."""
        rewards = train_rewards(group)
        totals = [
            sum(self._weights[name] * values[index] for name, values in rewards.items())
            for index in range(len(group.samples))
        ]
        chosen = ranked(totals, self._section.pairs_per_group)
        if not chosen:
            raise DataLoss("all samples have the same reward, so none is preferred", reason="NO_PREFERENCE")
        own = [(good, bad) for good, bad in chosen if good in indices]
        return preference_pairs.preference_pairs(group, own, fetch, count=self._level_count, seed=(self._seed, step))

    def stack(self, pairs: Sequence[PreferencePair], weight: float, device: torch.device) -> PreferenceBatch:
        """See `Objective`."""
        return preference_pairs.stack(pairs, weight, device)

    def terms(self, policy: Policy, batch: PreferenceBatch) -> Terms:
        """DPO loss of each pair."""
        reference = mean_per_sample((policy.reference_velocity(batch) - batch.target) ** 2)
        error = mean_per_sample((policy.velocity(batch) - batch.target) ** 2)
        outcome = dpo_loss(error, reference, beta=self._section.dpo_beta)
        chosen, rejected = (error - reference).detach().chunk(2)
        means = {
            "preference/accuracy": (outcome.margin > 0).float(),
            "preference/margin": outcome.margin,
            "preference/chosen_error": chosen,
            "preference/rejected_error": rejected,
        }
        return Terms(loss=outcome.loss, means=means)
