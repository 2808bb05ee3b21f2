"""DiffusionNFT (arXiv 2509.16117): contrast an implicit positive with a negative policy on the forward process."""

from collections.abc import Sequence
from functools import partial

import torch

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import Recipe
from headwater.diffusion.losses import mean_per_sample, nft_loss
from headwater.tensors.codec import Fetch
from headwater_trainer import forward_pairs
from headwater_trainer.forward_pairs import ForwardBatch, ForwardPair
from headwater_trainer.model import Policy
from headwater_trainer.objectives.base import Objective
from headwater_trainer.objectives.terms import Terms
from headwater_trainer.pairs import pairs_of


class Nft(Objective[ForwardPair, ForwardBatch]):
    """The `nft` objective. It needs final latents only, whatever sampled them, and takes samples of any age."""

    def __init__(self, recipe: Recipe) -> None:
        self._section = recipe.objective
        self._seed = recipe.run.seed
        self._level_count = recipe.levels_per_sample

    def pairs(self, group: ScoredGroup, indices: Sequence[int], fetch: Fetch, step: int) -> list[ForwardPair]:
        """Each sample at its own random levels of the rollout's grid."""
        of_sample = partial(forward_pairs.forward_pairs, count=self._level_count, seed=(self._seed, step))
        return pairs_of(group, indices, fetch, of_sample)

    def stack(self, pairs: Sequence[ForwardPair], weight: float, device: torch.device) -> ForwardBatch:
        """See `Objective`."""
        return forward_pairs.stack(pairs, weight, device)

    def terms(self, policy: Policy, batch: ForwardBatch) -> Terms:
        """NFT loss of each pair, plus kl_coef times the squared distance to the velocity of the reference."""
        section = self._section
        reference = policy.reference_velocity(batch) if section.kl_coef > 0 else None
        old, new = policy.old_and_new_velocity(batch)
        outcome = nft_loss(
            new, old, batch.latent, batch.x0, batch.sigma, batch.advantage, beta=section.beta, adv_clip=section.adv_clip
        )
        loss = outcome.loss
        means = {
            "loss/positive": outcome.positive,
            "loss/negative": outcome.negative,
            "optimality/mean": outcome.optimality,
            "old_distance": mean_per_sample((new.detach() - old) ** 2),
        }
        if reference is not None:
            kl = mean_per_sample((new - reference) ** 2)
            loss = loss + section.kl_coef * kl
            means["kl_to_reference"] = kl.detach()
        return Terms(loss=loss, means=means)
