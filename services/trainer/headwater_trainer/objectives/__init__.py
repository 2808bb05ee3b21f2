"""Objectives by name, one file each."""

from collections.abc import Callable, Mapping
from typing import Any

from headwater.config.recipe import Recipe
from headwater_trainer.objectives.awm import Awm
from headwater_trainer.objectives.base import Objective
from headwater_trainer.objectives.dpo import Dpo
from headwater_trainer.objectives.flow_grpo import FlowGrpo
from headwater_trainer.objectives.nft import Nft
from headwater_trainer.objectives.terms import Terms

__all__ = ["AnyObjective", "Objective", "Terms", "make_objective"]

AnyObjective = Objective[Any, Any]  # of whatever kind of pairs

_REGISTRY: Mapping[str, Callable[[Recipe], AnyObjective]] = {"flow_grpo": FlowGrpo, "nft": Nft, "awm": Awm, "dpo": Dpo}


def make_objective(recipe: Recipe) -> AnyObjective:
    """The objective that the recipe names."""
    return _REGISTRY[recipe.objective.name](recipe)
