"""Objectives by name, one file each. An objective turns a batch of pairs into a loss per pair and figures to report."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from headwater.config.recipe import Recipe
from headwater_trainer.model import Policy
from headwater_trainer.objectives.flow_grpo import FlowGrpo
from headwater_trainer.objectives.terms import Terms
from headwater_trainer.pairs import PairBatch

__all__ = ["Objective", "Terms", "make_objective"]


class Objective(Protocol):
    """A loss over training pairs."""

    def terms(self, policy: Policy, batch: PairBatch) -> Terms:
        """Loss and figures of each pair of the batch, with gradients."""
        ...

    def old_log_probs(self, policy: Policy, batch: PairBatch) -> Tensor:
        """Log-probs fp32 [B] of the recorded transitions under the present policy, without gradients."""
        ...


_REGISTRY: Mapping[str, Callable[[Recipe], Objective]] = {"flow_grpo": FlowGrpo}


def make_objective(recipe: Recipe) -> Objective:
    """The objective that the recipe names."""
    return _REGISTRY[recipe.objective.name](recipe)
