"""What objectives on the forward process share: pairs of final latents at noise levels of the rollout's grid."""

from collections.abc import Sequence
from functools import partial

import torch

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import Recipe
from headwater.tensors.codec import Fetch
from headwater_trainer import forward_pairs
from headwater_trainer.forward_pairs import ForwardBatch, ForwardPair
from headwater_trainer.objectives.base import Objective
from headwater_trainer.pairs import pairs_of


class ForwardObjective(Objective[ForwardPair, ForwardBatch]):
    """It needs final latents only, whatever sampled them, and takes samples of any age."""

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
