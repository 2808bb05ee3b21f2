"""Text and pictures to what a denoiser works on, and back: the frozen parts of a pipeline."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """The frozen text encoders and VAE of a pipeline, in fp32 on one device. Nothing has gradients."""

    def encode_text(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """The family's conditioning tensors, fp32 [B, ...] on the codec's device."""
        ...

    def encode_pictures(self, pixels: Tensor) -> Tensor:
        """Latents fp32 [B, C, h, w], the mean of the posterior, of RGB uint8 [B, H, W, 3]."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """RGB uint8 [B, H, W, 3] on the CPU of latents [B, C, h, w]."""
        ...


def to_pixels(images: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] on the CPU of what a VAE decodes, [B, 3, H, W] in [-1, 1]."""
    return ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def from_pixels(pixels: Tensor) -> Tensor:
    """fp32 [B, 3, H, W] in [-1, 1] of uint8 [B, H, W, 3]."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
