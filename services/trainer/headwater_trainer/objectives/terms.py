"""What an objective gives back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from headwater.diffusion.losses import PolicyLoss


@dataclass(frozen=True)
class Terms:
    """Loss and figures of B pairs. Figures are averaged, or maximised, over all pairs of a batch."""

    loss: Tensor  # fp32 [B], with gradient
    means: Mapping[str, Tensor] = field(default_factory=dict)  # fp32 [B] each
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # fp32 [B] each


def ratio_figures(outcome: PolicyLoss) -> dict[str, Tensor]:
    """The means of a loss with a ratio. The trainer makes the effective sample size of the first and the second."""
    return {
        "ratio/mean": outcome.ratio,
        "ratio/mean_square": outcome.ratio**2,
        "ratio/abs_deviation": (outcome.ratio - 1).abs(),
        "approx_kl": outcome.approx_kl,
        "clip_fraction/up": outcome.clipped_up.float(),
        "clip_fraction/down": outcome.clipped_down.float(),
    }
