"""The `Engine` protocol: what a rollout worker needs of a diffusion engine. Implementations: `sglang`, `diffusers`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headwater.sampling import ResolvedSampling


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is; all values are fixed once it has loaded."""

    engine: str
    engine_version: str
    model: str
    family: str
    components: tuple[str, ...]
    size_multiple_px: int
    device: str
    rank_count: int = 1


@dataclass(frozen=True)
class GroupRequest:
    """n samples of one prompt. Sample i depends on seeds[i] only, never on how it was batched."""

    prompt: str
    seeds: tuple[int, ...]
    sampling: ResolvedSampling
    record_trajectory: bool = True
    record_model_outputs: bool = False  # debug: parity


@dataclass
class GroupResult:
    """Everything of a generated group, on the CPU. n samples, T steps, W stochastic steps, K stored latents.

    Latents are stored at the inputs and outputs of the stochastic steps and at position T (the final latent).
    """

    media: np.ndarray  # uint8 [n, F, H, W, 3]
    latents: torch.Tensor  # fp32 [n, K, ...]
    latent_positions: tuple[int, ...]  # length K, increasing; position T is the final latent
    timesteps: torch.Tensor  # fp32 [T+1], last is 0
    sigmas: torch.Tensor  # fp32 [T+1], post-shift, last is 0
    trained_steps: tuple[int, ...]  # length W
    log_probs: torch.Tensor  # fp32 [n, W], mean over the latent's dimensions
    positive: Mapping[str, torch.Tensor] = field(default_factory=dict)  # conditioning, without batch dimension
    negative: Mapping[str, torch.Tensor] = field(default_factory=dict)
    model_outputs: torch.Tensor | None = None  # fp32 [n, W, ...], with record_model_outputs only


class Engine(Protocol):
    """A loaded model that generates groups. Calls come from one thread at a time."""

    info: EngineInfo

    def generate(self, request: GroupRequest) -> GroupResult:
        """Generate one group. Raises `InvalidArgument` for what the model cannot make."""
        ...

    def weight_views(self, component: str) -> Mapping[str, Sequence[torch.Tensor]]:
        """Live parameters of a component by diffusers name.

        Each name maps to views into the engine's own storage that together hold the tensor, split along dimension 0
        where the engine has fused or sharded it (normally one view). Writing to a view changes the next generation.
        Raises `InvalidArgument` for a component that the engine does not have.
        """
        ...

    def weights_changed(self) -> None:
        """Called after views were written: drop whatever was derived from the old weights (graphs, caches)."""
        ...

    def release_memory(self) -> int:
        """Move weights off the device; returns the bytes freed."""
        ...

    def resume_memory(self) -> int:
        """Bring them back; returns the bytes taken."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
