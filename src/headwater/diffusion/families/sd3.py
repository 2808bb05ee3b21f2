"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206): one MMDiT, velocity prediction, timestep = 1000 * sigma."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from headwater.diffusion.families.codec import Codec
from headwater.diffusion.families.config import read_config

_CLIP_TOKENS, _T5_TOKENS = 77, 256


class SD3:
    """The `sd3` family. Latents are fp32 [B, C, H / 8, W / 8] for the usual VAE."""

    name = "sd3"
    components: tuple[str, ...] = ("transformer",)
    lora_targets: tuple[str, ...] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    conditioning_names: tuple[str, ...] = ("encoder_hidden_states", "pooled_projections")  # [L, D] and [P] per sample

    def load_component(self, model_dir: str | Path, component: str, dtype: torch.dtype) -> nn.Module:
        """The SD3Transformer2DModel on the CPU in eval mode. Raises ValueError for another component."""
        from diffusers import SD3Transformer2DModel  # slow to import

        if component not in self.components:
            raise ValueError(
                f"component {component!r} of sd3 cannot be trained; use one of {', '.join(self.components)}"
            )
        module = SD3Transformer2DModel.from_pretrained(Path(model_dir) / component, torch_dtype=dtype)
        return module.eval()

    def codec(self, model_dir: str | Path, device: torch.device) -> Codec:
        """The frozen text encoders and VAE on `device`."""
        from headwater.diffusion.families.sd3_codec import SD3Codec  # slow to import

        return SD3Codec(model_dir, self.text_tokens(model_dir)[-1], device)

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The joint transformer blocks."""
        return list(module.get_submodule("transformer_blocks").children())

    def predict(
        self, module: nn.Module, latent: Tensor, timestep: Tensor, conditioning: Mapping[str, Tensor]
    ) -> Tensor:
        """Velocity fp32 [B, C, H, W]; `timestep` is 1000 * sigma, fp32 [B]."""
        velocity = module(
            hidden_states=latent,
            timestep=timestep,
            encoder_hidden_states=conditioning["encoder_hidden_states"],
            pooled_projections=conditioning["pooled_projections"],
            return_dict=False,
        )[0]
        return velocity.float()

    def guided(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance in the order of operations of SGLang-diffusion's CFGPolicy."""
        return negative + scale * (positive - negative)

    def size_multiple_px(self, model_dir: str | Path) -> int:
        """The VAE's scale factor times the patch size."""
        patch = int(read_config(model_dir, "transformer/config.json")["patch_size"])
        return self._vae_scale(model_dir) * patch

    def latent_shape(self, model_dir: str | Path, height_px: int, width_px: int) -> tuple[int, ...]:
        """[C, H / s, W / s] for a VAE of scale factor s."""
        channels = int(read_config(model_dir, "transformer/config.json")["in_channels"])
        scale = self._vae_scale(model_dir)
        return (channels, height_px // scale, width_px // scale)

    def text_tokens(self, model_dir: str | Path) -> tuple[int, int, int]:
        """How many tokens each of the three text encoders is given, padding included: what its tokenizer allows
        (`model_max_length`), and at most what SD3 was trained with."""
        return (
            min(_CLIP_TOKENS, _max_length(model_dir, "tokenizer")),
            min(_CLIP_TOKENS, _max_length(model_dir, "tokenizer_2")),
            min(_T5_TOKENS, _max_length(model_dir, "tokenizer_3")),
        )

    def _vae_scale(self, model_dir: str | Path) -> int:
        channels = read_config(model_dir, "vae/config.json")["block_out_channels"]
        return int(2 ** (len(channels) - 1))


def _max_length(model_dir: str | Path, tokenizer: str) -> int:
    return int(read_config(model_dir, f"{tokenizer}/tokenizer_config.json").get("model_max_length", _T5_TOKENS))
