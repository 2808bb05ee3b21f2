"""Noise that belongs to a sample: drawn from its own seed, in its own shape, so that batching cannot change it."""

from collections.abc import Sequence

import torch


class SampleNoise:
    """The random streams of n samples.

    Each sample has one generator on the CPU, whatever the engine's device, seeded with the sample's seed. Every draw
    takes the next fp32 tensor of the latent's shape from each stream: the initial latent first, then one per stochastic
    step.
    """

    def __init__(self, seeds: Sequence[int], latent_shape: Sequence[int], device: torch.device | str) -> None:
        self.count = len(seeds)
        self._generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        self._shape = tuple(latent_shape)
        self._device = torch.device(device)

    def draw(self) -> torch.Tensor:
        """Standard normal fp32 [n, *latent_shape] on the engine's device."""
        rows = [torch.randn(self._shape, generator=generator) for generator in self._generators]
        return torch.stack(rows).to(self._device)
