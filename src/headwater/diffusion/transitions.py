"""One denoise step and its log-probability (Flow-GRPO arXiv 2505.05470, DanceGRPO 2505.07818, Flow-CPS 2509.05952).

A latent on the path is x = (1 - sigma) * x0 + sigma * noise; the model predicts the velocity v = noise - x0. A step
goes from sigma to next_sigma < sigma, dt = next_sigma - sigma. All of it is fp32, or fp64 for fp64 latents.

The order of the operations is that of SGLang-diffusion's FlowRolloutController: on the same inputs the means, and with
`log_prob` on the recorded latents the log-probabilities, of engine and trainer are equal bit for bit on a CPU. Sigmas
must be the recorded grid: one rebuilt from timestep / 1000 is off by an ulp or two, about 3e-5 in log-probability.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

TransitionName = Literal["sde", "dance", "cps", "ode"]
Reduction = Literal["mean", "sum"]

_LOG_SQRT_2PI = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class Transition:
    """The distribution of the next latent: Normal(mean, std), std the same for all dimensions of a sample."""

    kind: TransitionName
    mean: Tensor  # fp32 [B, ...]
    std: Tensor  # fp32 [B, 1, ...]; 0 for "ode"
    noise_scale: Tensor  # fp32 [B, 1, ...]: s, the std per square root of time for sde and dance; equal to std for cps

    def sample_next(self, noise: Tensor) -> Tensor:
        """The next latent fp32 [B, ...] for standard normal `noise` of the same shape."""
        return self.mean + noise * self.std

    def log_prob(self, next_latent: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Log-probability fp32 [B] of `next_latent` fp32 [B, ...]; differentiable with respect to the mean.

        "mean" averages over the latent's dimensions, as the field does: exp of a difference of means is the 1/D power
        of the true ratio for D dimensions. "sum" is the true log-density. For cps the constants are dropped, as in its
        paper. Raises ValueError for "ode", which has no density.
        """
        if self.kind == "ode":
            raise ValueError(
                "an ode step is deterministic and has no log-probability; train on sde, dance or cps steps"
            )
        if reduction not in get_args(Reduction):
            raise ValueError(f"log_prob reduction is {reduction!r}; use 'mean' or 'sum'")
        squared = -((_floating(next_latent) - self.mean) ** 2)
        if self.kind != "cps":
            squared = squared / (2 * (self.std**2)) - torch.log(self.std) - _LOG_SQRT_2PI
        total = squared.sum(dim=list(range(1, squared.ndim)))
        return total if reduction == "sum" else total / float(math.prod(squared.shape[1:]))


def transition(
    kind: str,
    latent: Tensor,
    velocity: Tensor,
    *,
    sigma: Tensor | float,
    next_sigma: Tensor | float,
    sigma_after_first: Tensor | float,
    noise_level: float,
) -> Transition:
    """The step from `sigma` to `next_sigma` for `latent` and the model output `velocity`, both [B, ...].

    Sigmas are numbers or tensors of shape [] or [B], values of the recorded grid; `sigma_after_first` is the grid's
    second value, which replaces sigma = 1 in the SDE's std. `noise_level` is eta. Raises ValueError for another kind.
    """
    x, v = _floating(latent), _floating(velocity)
    now, then, second = (_per_sample(value, x) for value in (sigma, next_sigma, sigma_after_first))
    dt = then - now
    if kind == "sde":
        return _sde(x, v, now, dt, second, noise_level)
    if kind == "dance":
        return _dance(x, v, now, dt, noise_level)
    if kind == "cps":
        return _cps(x, v, now, then, noise_level)
    if kind == "ode":
        zero = torch.zeros_like(dt)
        return Transition("ode", x + dt * v, zero, zero)
    raise ValueError(f"transition {kind!r} is unknown; use one of {', '.join(get_args(TransitionName))}")


def grid_transition(
    kind: str, latent: Tensor, velocity: Tensor, *, sigmas: Tensor, step: int, noise_level: float
) -> Transition:
    """`transition` at `step` (0-based) of the grid `sigmas` fp32 [T+1], for all samples of a batch at once."""
    return transition(
        kind,
        latent,
        velocity,
        sigma=sigmas[step],
        next_sigma=sigmas[step + 1],
        sigma_after_first=sigmas[1],
        noise_level=noise_level,
    )


def _sde(x: Tensor, v: Tensor, sigma: Tensor, dt: Tensor, second: Tensor, eta: float) -> Transition:
    is_first = torch.isclose(sigma, torch.ones_like(sigma))
    scale = torch.sqrt(sigma / (1 - torch.where(is_first, second, sigma))) * eta
    std = scale * torch.sqrt(-1 * dt)
    mean = x * (1 + scale**2 / (2 * sigma) * dt) + v * (1 + scale**2 * (1 - sigma) / (2 * sigma)) * dt
    return Transition("sde", mean, std, scale)


def _dance(x: Tensor, v: Tensor, sigma: Tensor, dt: Tensor, eta: float) -> Transition:
    scale = torch.full_like(sigma, eta)
    clean = x - sigma * v
    drift = 0.5 * eta**2 * (x - clean * (1 - sigma)) / sigma**2
    return Transition("dance", x + (v + drift) * dt, scale * torch.sqrt(-1 * dt), scale)


def _cps(x: Tensor, v: Tensor, sigma: Tensor, next_sigma: Tensor, eta: float) -> Transition:
    std = next_sigma * math.sin(eta * math.pi / 2)
    clean = x - sigma * v
    noise = x + v * (1 - sigma)
    mean = clean * (1 - next_sigma) + noise * torch.sqrt(next_sigma**2 - std**2)
    return Transition("cps", mean, std, std)


def _floating(tensor: Tensor) -> Tensor:
    """fp32, or fp64 where a gradient is checked."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _per_sample(value: Tensor | float, like: Tensor) -> Tensor:
    """`value` as [B, 1, ...] (or [1, 1, ...] for a scalar) of the dtype of `like` [B, ...], to broadcast against it."""
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tensor.reshape(-1, *([1] * (like.ndim - 1)))
