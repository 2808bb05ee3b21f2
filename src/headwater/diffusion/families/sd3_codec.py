"""The text encoders and the VAE of SD3, as diffusers runs them."""

from collections.abc import Sequence
from pathlib import Path

import diffusers
import torch
from torch import Tensor

from headwater.diffusion.families.codec import from_pixels, to_pixels


class SD3Codec:
    """`Codec` of an SD3 pipeline folder."""

    def __init__(self, model_dir: str | Path, t5_tokens: int, device: torch.device) -> None:
        self._device = device
        self._t5_tokens = t5_tokens
        self._pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(
            str(model_dir), transformer=None, torch_dtype=torch.float32
        ).to(device)
        self._pipeline.vae.eval()

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """encoder_hidden_states fp32 [B, L, D] and pooled_projections fp32 [B, P]."""
        texts = list(prompts)
        embeddings, _, pooled, _ = self._pipeline.encode_prompt(
            texts, texts, texts, device=self._device, do_classifier_free_guidance=False,
            max_sequence_length=self._t5_tokens,
        )  # fmt: skip
        return {"encoder_hidden_states": embeddings.float(), "pooled_projections": pooled.float()}

    @torch.no_grad()
    def encode_pictures(self, pixels: Tensor) -> Tensor:
        """Latents fp32 [B, C, h, w] of RGB uint8 [B, H, W, 3]."""
        vae = self._pipeline.vae
        mean = vae.encode(from_pixels(pixels.to(self._device))).latent_dist.mean
        return (mean - vae.config.shift_factor) * vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """RGB uint8 [B, H, W, 3] on the CPU of latents [B, C, h, w]."""
        vae = self._pipeline.vae
        scaled = latents.to(self._device) / vae.config.scaling_factor + vae.config.shift_factor
        return to_pixels(vae.decode(scaled, return_dict=False)[0])
