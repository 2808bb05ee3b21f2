"""A moving average of the trained weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwater.diffusion.decay import ema_decay


class Ema:
    """Averages of parameters, sharded as they are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], max_decay: float) -> None:
        self._parameters = dict(parameters)
        self._averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._max_decay = max_decay

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the present weights, those after `updates` optimizer updates."""
        torch._foreach_lerp_(
            list(self._averages.values()), list(self._parameters.values()), 1 - ema_decay(updates, self._max_decay)
        )

    def tensors(self) -> dict[str, Tensor]:
        """The averages under names of their own, as a checkpoint keeps and restores them (in place)."""
        return {f"ema.{name}": average for name, average in self._averages.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the parameters have their averages as values."""
        trained = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._set(self._averages)
        try:
            yield
        finally:
            self._set(trained)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
