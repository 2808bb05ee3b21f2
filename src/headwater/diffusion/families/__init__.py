"""Model families, one file each. `resolve` finds the family of a diffusers-format model folder.

A family knows what differs between models: components, LoRA targets, conditioning, timestep convention, guidance rule
and FSDP units. Trainer, diffusers engine and parity check share it, so that they compute the same thing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwater.diffusion.families.codec import Codec
from headwater.diffusion.families.config import read_config
from headwater.diffusion.families.sd3 import SD3


class Family(Protocol):
    """What differs between models. Implementations are stateless."""

    name: str
    components: tuple[str, ...]  # trainable modules of the pipeline
    lora_targets: tuple[str, ...]  # module names as peft matches them: a suffix of the full name
    conditioning_names: tuple[str, ...]  # tensors the model is given besides latent and timestep

    def load_component(self, model_dir: str | Path, component: str, dtype: torch.dtype) -> nn.Module:
        """The diffusers module of `component` with its weights, on the CPU, in eval mode."""
        ...

    def codec(self, model_dir: str | Path, device: torch.device) -> Codec:
        """The frozen text encoders and VAE of the pipeline on `device`."""
        ...

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks of a component in the order of execution: the units of FSDP."""
        ...

    def predict(
        self, module: nn.Module, latent: Tensor, timestep: Tensor, conditioning: Mapping[str, Tensor]
    ) -> Tensor:
        """Velocity fp32 [B, ...] for `latent` [B, ...], `timestep` fp32 [B] in the model's convention and conditioning
        tensors that have a batch dimension. Call it under autocast for bf16."""
        ...

    def guided(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Velocity under classifier-free guidance from that of both branches."""
        ...

    def size_multiple_px(self, model_dir: str | Path) -> int:
        """Height and width in pixels must be multiples of this."""
        ...

    def latent_shape(self, model_dir: str | Path, height_px: int, width_px: int) -> tuple[int, ...]:
        """Shape of one latent without the batch dimension."""
        ...

    def text_tokens(self, model_dir: str | Path) -> tuple[int, ...]:
        """How many tokens each text encoder is given, padding included."""
        ...


_BY_PIPELINE: Mapping[str, Family] = {"StableDiffusion3Pipeline": SD3()}


def resolve(model_dir: str | Path) -> Family:
    """The family of the pipeline in `model_dir`, by the `_class_name` of its model_index.json.

    Raises ValueError when the folder is no diffusers pipeline, or when its family is not supported.
    """
    index = read_config(model_dir, "model_index.json")
    name = index.get("_class_name", "")
    if name not in _BY_PIPELINE:
        raise ValueError(
            f"{model_dir}: pipeline {name!r} is not supported; supported are {', '.join(sorted(_BY_PIPELINE))}"
        )
    return _BY_PIPELINE[name]


def scheduler_config(model_dir: str | Path) -> Mapping[str, Any]:
    """The scheduler_config.json of a pipeline, as `headwater.diffusion.schedules.schedule` takes it."""
    return read_config(model_dir, "scheduler/scheduler_config.json")


def names() -> Sequence[str]:
    """Names of all families, sorted."""
    return sorted(family.name for family in _BY_PIPELINE.values())
