"""Pictures of fixed prompts and seeds, made by the trainer to watch it learn."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from headwater.config.prompts import load_prompts
from headwater.config.recipe import Recipe
from headwater.diffusion import families
from headwater.diffusion.families.codec import Codec
from headwater.diffusion.schedules import schedule
from headwater_trainer.model import Policy


class Pictures:
    """Draws the same grid again and again. All ranks call `draw` together; rank 0 saves."""

    def __init__(self, recipe: Recipe, codec: Codec) -> None:
        section, sampling = recipe.pictures, recipe.sampling
        prompts = [item.text for item in load_prompts(recipe.prompts)]
        chosen = [prompts[index % len(prompts)] for index in range(section.count)]
        self._codec = codec
        self._positive = codec.encode_text(chosen)
        self._negative = (
            codec.encode_text([sampling.negative_prompt] * len(chosen)) if sampling.guidance_scale > 1 else {}
        )
        path = recipe.model.path
        self._schedule = schedule(families.scheduler_config(path), sampling.steps, sampling.flow_shift)
        shape = families.resolve(path).latent_shape(path, sampling.height_px, sampling.width_px)
        generator = torch.Generator().manual_seed(recipe.run.seed)
        self._noise = torch.randn(section.count, *shape, generator=generator)

    @torch.no_grad()
    def draw(self, policy: Policy) -> Tensor:
        """uint8 [count, H, W, 3], by the deterministic sampler under the present weights."""
        latents = denoise(policy, self._schedule.sigmas, self._noise, self._positive, self._negative)
        return self._codec.decode(latents)


@dataclass(frozen=True)
class _Input:
    latent: Tensor
    timestep: Tensor
    positive: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]


@torch.no_grad()
def denoise(
    policy: Policy, sigmas: Tensor, noise: Tensor, positive: Mapping[str, Tensor], negative: Mapping[str, Tensor]
) -> Tensor:
    """Latents fp32 [B, ...] after Euler steps along `sigmas` [T+1] from `noise` [B, ...]."""
    latents = noise.to(policy.device)
    for sigma, following in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        timestep = torch.full((len(latents),), 1000 * sigma, device=policy.device)
        velocity = policy.velocity(_Input(latents, timestep, positive, negative))
        latents = latents + velocity * (following - sigma)
    return latents


def save_grid(pictures: Tensor, path: Path) -> None:
    """A PNG of uint8 [n, H, W, 3] in rows, nearly square."""
    count, height, width, _ = pictures.shape
    columns = math.ceil(math.sqrt(count * 1.5))
    rows = math.ceil(count / columns)
    sheet = torch.full((rows * (height + 2), columns * (width + 2), 3), 128, dtype=torch.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // columns * (height + 2) + 1, index % columns * (width + 2) + 1
        sheet[top : top + height, left : left + width] = picture
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet.numpy()).save(path)
