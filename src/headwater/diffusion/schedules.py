"""Sigma grids of flow-matching schedulers, equal bit for bit to those of diffusers' FlowMatchEulerDiscreteScheduler,
and the forward process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Grid = TypeVar("Grid", np.ndarray, Tensor)

_UNSUPPORTED = (
    "use_dynamic_shifting",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "shift_terminal",
    "invert_sigmas",
    "stochastic_sampling",
)


@dataclass(frozen=True)
class Schedule:
    """The grid of one denoise run of T steps."""

    sigmas: Tensor  # fp32 [T+1], after shifting, strictly decreasing, the last is 0
    timesteps: Tensor  # fp32 [T+1], as the model is given them, the last is 0


def schedule(config: Mapping[str, Any], steps: int, flow_shift: float | None = None) -> Schedule:
    """The grid that a scheduler with this `config` (scheduler_config.json) makes for `steps` steps.

    `flow_shift` replaces the config's shift as `set_shift` does: the range of training sigmas stays that of the config.
    Raises ValueError for a scheduler, or an option of it, whose grid is another.
    """
    name = config.get("_class_name", "FlowMatchEulerDiscreteScheduler")
    if name != "FlowMatchEulerDiscreteScheduler":
        raise ValueError(f"scheduler {name} is not supported; use FlowMatchEulerDiscreteScheduler")
    if used := [option for option in _UNSUPPORTED if config.get(option)]:
        raise ValueError(f"scheduler option {used[0]} is not supported; set it to false in scheduler_config.json")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    count = int(config.get("num_train_timesteps", 1000))
    own_shift = float(config.get("shift", 1.0))
    shift = own_shift if flow_shift is None else flow_shift

    trained = np.linspace(1, count, count, dtype=np.float32)[::-1].copy()
    bounds = shifted(torch.from_numpy(trained) / count, own_shift)
    grid = np.linspace(bounds[0].item() * count, bounds[-1].item() * count, steps) / count
    sigmas = torch.from_numpy(shifted(grid, shift)).to(torch.float32)
    zero = torch.zeros(1)
    return Schedule(sigmas=torch.cat([sigmas, zero]), timesteps=torch.cat([sigmas * count, zero]))


def shifted(sigmas: Grid, shift: float) -> Grid:
    """Sigmas after a static timestep shift: k * sigma / (1 + (k - 1) * sigma) (SD3, arXiv 2403.03206, eq. 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The forward process at `sigma` [B]: (1 - sigma) x0 + sigma noise, [B, ...] like `x0` and `noise`."""
    share = sigma.view(-1, *[1] * (x0.ndim - 1))
    return (1 - share) * x0 + share * noise
