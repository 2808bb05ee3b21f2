"""What an objective gives back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Loss and figures of B pairs. Figures are averaged, or maximised, over all pairs of a batch."""

    loss: Tensor  # fp32 [B], with gradient
    means: Mapping[str, Tensor] = field(default_factory=dict)  # fp32 [B] each
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # fp32 [B] each
