"""Losses of training pairs. B pairs; every result is per pair, so that micro-batches add up to any batch."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

_MIN_NFT_WEIGHT = 1e-5  # DiffusionNFT's floor of the adaptive weight


@dataclass(frozen=True)
class PolicyLoss:
    """Outcome of a policy-gradient loss; only `loss` carries a gradient."""

    loss: Tensor  # fp32 [B], to be averaged over the pairs of the whole batch
    ratio: Tensor  # fp32 [B]
    approx_kl: Tensor  # fp32 [B], half the squared difference of the log-probs
    clipped_up: Tensor  # bool [B], ratio above 1 + clip range
    clipped_down: Tensor  # bool [B], ratio below 1 - clip range


def flow_grpo_loss(
    log_prob: Tensor,
    log_prob_old: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    adv_clip: float,
    guard: "Guard | None" = None,
    trust: "TrustRegion | None" = None,
) -> PolicyLoss:
    """Clipped policy gradient of Flow-GRPO (arXiv 2505.05470, eq. 5), without its KL term (`kl_to_reference`).

    ratio = exp(log_prob - log_prob_old); loss = max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c)) with A clamped to
    +-adv_clip. All inputs are fp32 [B]; the gradient flows to `log_prob`, and to the bias of `guard`.

    `guard` changes ratio and scale of the loss, `trust` takes the place of the clip: see there.
    """
    difference = log_prob - log_prob_old.detach()
    ratio = torch.exp(difference if guard is None else (difference + guard.bias) * guard.std)
    clamped = advantage.detach().clamp(-adv_clip, adv_clip)
    seen = ratio.detach()
    if trust is None:
        loss = torch.maximum(-clamped * ratio, -clamped * ratio.clamp(1 - clip_range, 1 + clip_range))
    else:
        loss = torch.where(trust.left(seen, clamped), 0.0, -clamped * ratio)
    loss = loss if guard is None else loss / guard.time
    return PolicyLoss(
        loss=loss,
        ratio=seen,
        approx_kl=0.5 * difference.detach() ** 2,
        clipped_up=seen > 1 + clip_range,
        clipped_down=seen < 1 - clip_range,
    )


@dataclass(frozen=True)
class Guard:
    """GRPO-Guard (arXiv 2510.22319): ratios centred at 1 at every step, and steps of equal weight.

    ratio = exp((log_prob - log_prob_old + bias) * std), and the loss is divided by `time`.
    """

    bias: Tensor  # [B], mean((mean - mean_old)^2) / (2 std^2), which the log-prob difference lies below 0 on average
    std: Tensor  # [B], of the step: s sqrt(-dt)
    time: Tensor  # [B], -dt


@dataclass(frozen=True)
class TrustRegion:
    """Flow-DPPO (arXiv 2606.11025): a bound on the divergence of the whole step in place of a clip of the ratio."""

    divergence: Tensor  # [B], mean((mean - mean_old)^2) / (2 std^2)
    threshold: float

    def left(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """bool [B]: outside of the region, and moving further away; such a pair teaches nothing."""
        away = ((ratio > 1) & (advantage > 0)) | ((ratio < 1) & (advantage < 0))
        return (self.divergence.detach() >= self.threshold) & away


def step_divergence(mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """[B]: mean((mean - mean_old)^2) / (2 std^2) of two steps, `mean` [B, ...] and `std` [B, 1, ...]."""
    return mean_per_sample((mean - mean_old.detach()) ** 2 / (2 * std**2))


def kl_to_reference(mean: Tensor, reference_mean: Tensor, noise_scale: Tensor) -> Tensor:
    """KL [B] between the steps of policy and reference: mean((mean - reference)^2) / (2 * s^2) (Flow-GRPO).

    `mean`, `reference_mean` [B, ...]; `noise_scale` is `Transition.noise_scale`, [B, 1, ...].
    """
    return mean_per_sample((mean - reference_mean.detach()) ** 2 / (2 * noise_scale**2))


@dataclass(frozen=True)
class NftLoss:
    """Outcome of the DiffusionNFT loss; only `loss` carries a gradient."""

    loss: Tensor  # [B], to be averaged over the pairs of the whole batch
    positive: Tensor  # [B], of the implicit positive policy
    negative: Tensor  # [B], of the implicit negative policy
    optimality: Tensor  # [B], r in [0, 1]: the share of the positive policy


def nft_loss(
    velocity: Tensor,
    velocity_old: Tensor,
    latent: Tensor,
    x0: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    *,
    beta: float,
    adv_clip: float,
    adaptive: bool = True,
) -> NftLoss:
    """Policy loss of DiffusionNFT (arXiv 2509.16117), without its KL term, mean((velocity - reference)^2).

    `velocity` of the trained and `velocity_old` of the old policy at `latent` = (1 - sigma) x0 + sigma noise, all
    [B, ...] of one floating dtype; `sigma` and `advantage` [B]. The implicit policies are positive = beta * new +
    (1 - beta) * old and negative = (1 + beta) * old - beta * new. Each is judged by its squared error in x0, divided
    by the mean absolute error of the same sample when `adaptive`. r is the advantage, clamped to +-C (`adv_clip`) and
    mapped to [0, 1]: loss = C * (r * positive + (1 - r) * negative) / beta. The gradient flows to `velocity` alone.
    """
    old, level = velocity_old.detach(), sigma.detach().reshape(-1, *[1] * (latent.ndim - 1))
    clamped = advantage.detach().clamp(-adv_clip, adv_clip)
    optimality = (clamped / (2 * adv_clip) + 0.5).clamp(0, 1)
    positive = _x0_error(beta * velocity + (1 - beta) * old, latent, x0, level, adaptive)
    negative = _x0_error((1 + beta) * old - beta * velocity, latent, x0, level, adaptive)
    loss = adv_clip * (optimality * positive + (1 - optimality) * negative) / beta
    return NftLoss(loss, positive.detach(), negative.detach(), optimality)


def _x0_error(velocity: Tensor, latent: Tensor, x0: Tensor, level: Tensor, adaptive: bool) -> Tensor:
    """[B]: mean squared error in x0; `adaptive` divides it by the mean absolute error, taken in fp64 as a constant."""
    error = latent - level * velocity - x0
    if adaptive:
        weight = mean_per_sample(error.detach().double().abs()).clamp(min=_MIN_NFT_WEIGHT)
        return mean_per_sample(error**2 / weight.reshape(level.shape)).to(velocity.dtype)
    return mean_per_sample(error**2)


@dataclass(frozen=True)
class DpoLoss:
    """Outcome of the DPO loss; only `loss` carries a gradient."""

    loss: Tensor  # [B], to be averaged over the pairs of the whole batch
    margin: Tensor  # [B], inside the sigmoid: above 0 where the policy prefers as the rewards do, 0 at the reference


def dpo_loss(error: Tensor, reference_error: Tensor, *, beta: float) -> DpoLoss:
    """Diffusion-DPO (arXiv 2311.12908, eq. 14): -log sigmoid(-beta / 2 ((e_w - ref_w) - (e_l - ref_l))).

    `error` and `reference_error` [2 B] are mean squared errors of the velocity, of the preferred latents and then of
    the others, both at the same noise and level. The gradient flows to `error` alone.
    """
    (chosen, rejected), (chosen_ref, rejected_ref) = error.chunk(2), reference_error.detach().chunk(2)
    margin = -0.5 * beta * ((chosen - rejected) - (chosen_ref - rejected_ref))
    return DpoLoss(-torch.nn.functional.logsigmoid(margin), margin.detach())


AwmWeighting = Literal["uniform", "linear", "quadratic", "ghuber"]


def awm_log_likelihood(
    velocity: Tensor, target: Tensor, sigma: Tensor, weighting: str = "uniform", ghuber_power: float = 0.25
) -> Tensor:
    """What advantage-weighted matching (arXiv 2509.25050) has in place of a log-probability: minus the matching loss.

    [B] of `velocity` and `target` = noise - x0, both [B, ...], at `sigma` [B]. With m the mean squared error it is
    -m ("uniform"), -sigma m ("linear"), -sigma^2 m ("quadratic") or -sigma m^p / p with p = `ghuber_power` ("ghuber").
    Two of them go into `flow_grpo_loss`. Raises ValueError for another weighting.
    """
    error = mean_per_sample((velocity - target) ** 2)
    if weighting == "uniform":
        return -error
    if weighting == "linear":
        return -sigma * error
    if weighting == "quadratic":
        return -(sigma**2) * error
    if weighting == "ghuber":
        return -sigma * error**ghuber_power / ghuber_power
    raise ValueError(f"weighting is {weighting!r}; use one of {', '.join(get_args(AwmWeighting))}")


def mean_per_sample(values: Tensor) -> Tensor:
    """[B]: the mean over all other dimensions of [B, ...]."""
    return values.flatten(1).mean(1)
