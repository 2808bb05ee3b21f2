"""Supervised fine-tuning by flow matching (SD3, arXiv 2403.03206): regress the velocity noise - x0."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.config.recipe import Recipe
from headwater.diffusion.losses import mean_per_sample
from headwater.diffusion.schedules import noised, shifted
from headwater_trainer.model import Policy

GRID = 1000  # points of the sigma grid, as SD3 was trained
BUCKETS = 4  # equal parts of [0, 1] in which the loss is reported


@dataclass(frozen=True)
class NoisyBatch:
    """B noisy latents: a `ModelInput`, and what is to be learnt from it."""

    latent: Tensor  # fp32 [B, ...], (1 - sigma) x0 + sigma noise
    timestep: Tensor  # fp32 [B]
    sigma: Tensor  # fp32 [B]
    target: Tensor  # fp32 [B, ...], noise - x0
    positive: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]


class Sft:
    """The `sft` objective."""

    def __init__(self, recipe: Recipe, model_shift: float) -> None:
        """`model_shift` is the shift of the model's scheduler; sampling.flow_shift of the recipe comes first."""
        shift = recipe.sampling.flow_shift
        self._distribution = recipe.objective.sigma_distribution
        self._grid = shifted(torch.arange(1, GRID + 1) / GRID, model_shift if shift is None else shift)

    def draw_sigmas(self, count: int, generator: torch.Generator) -> Tensor:
        """Noise levels fp32 [count] of the shifted grid, on the CPU."""
        if self._distribution == "uniform":
            index = torch.randint(GRID, (count,), generator=generator)
        else:
            share = torch.sigmoid(torch.randn(count, generator=generator))
            index = (share * GRID).long().clamp(max=GRID - 1)
        return self._grid[index]

    def losses(self, policy: Policy, batch: NoisyBatch) -> Tensor:
        """fp32 [B], mean squared error of the velocity of each row, with gradient."""
        return mean_per_sample((policy.velocity(batch) - batch.target) ** 2)


def noisy(latents: Tensor, noise: Tensor, sigma: Tensor, conditioning: Mapping[str, Tensor]) -> NoisyBatch:
    """Mix x0 `latents` and `noise`, fp32 [B, ...], by `sigma` fp32 [B]."""
    return NoisyBatch(
        latent=noised(latents, noise, sigma),
        timestep=1000 * sigma,
        sigma=sigma,
        target=noise - latents,
        positive=conditioning,
        negative={},
    )


def bucket_of(sigma: Tensor) -> Tensor:
    """Which part of [0, 1] each sigma lies in, int64, 0 to BUCKETS - 1."""
    return (sigma * BUCKETS).long().clamp(max=BUCKETS - 1)
