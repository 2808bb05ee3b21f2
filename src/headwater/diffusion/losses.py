"""Losses on recorded transitions. B pairs; every result is per pair, so that micro-batches add up to any batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Outcome of a policy-gradient loss; only `loss` carries a gradient."""

    loss: Tensor  # fp32 [B], to be averaged over the pairs of the whole batch
    ratio: Tensor  # fp32 [B]
    approx_kl: Tensor  # fp32 [B], half the squared difference of the log-probs
    clipped_up: Tensor  # bool [B], ratio above 1 + clip range
    clipped_down: Tensor  # bool [B], ratio below 1 - clip range


def flow_grpo_loss(
    log_prob: Tensor, log_prob_old: Tensor, advantage: Tensor, *, clip_range: float, adv_clip: float
) -> PolicyLoss:
    """Clipped policy gradient of Flow-GRPO (arXiv 2505.05470, eq. 5), without its KL term (`kl_to_reference`).

    ratio = exp(log_prob - log_prob_old); loss = max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c)) with A clamped to
    +-adv_clip. All inputs are fp32 [B]; the gradient flows to `log_prob` alone.
    """
    difference = log_prob - log_prob_old.detach()
    ratio = torch.exp(difference)
    clamped = advantage.detach().clamp(-adv_clip, adv_clip)
    loss = torch.maximum(-clamped * ratio, -clamped * ratio.clamp(1 - clip_range, 1 + clip_range))
    seen = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=seen,
        approx_kl=0.5 * difference.detach() ** 2,
        clipped_up=seen > 1 + clip_range,
        clipped_down=seen < 1 - clip_range,
    )


def kl_to_reference(mean: Tensor, reference_mean: Tensor, noise_scale: Tensor) -> Tensor:
    """KL [B] between the steps of policy and reference: mean((mean - reference)^2) / (2 * s^2) (Flow-GRPO).

    `mean`, `reference_mean` [B, ...]; `noise_scale` is `Transition.noise_scale`, [B, 1, ...].
    """
    squared = (mean - reference_mean.detach()) ** 2 / (2 * noise_scale**2)
    return squared.mean(dim=list(range(1, squared.ndim)))
