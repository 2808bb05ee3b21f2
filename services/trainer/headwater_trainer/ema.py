"""A moving average of the trained weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """Averages of parameters, sharded as they are."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: Callable[[int], float], name: str = "ema"
    ) -> None:
        """`decay(n)` is the share of the averages that the update after n optimizer updates leaves."""
        self._parameters = dict(parameters)
        self._averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._decay = decay
        self._name = name

    @torch.no_grad()
    def update(self, updates: int) -> float:
        """Take in the present weights, those after `updates` optimizer updates; returns the decay: 0 is a copy."""
        decay = self._decay(updates)
        torch._foreach_lerp_(list(self._averages.values()), list(self._parameters.values()), 1 - decay)
        return decay

    def tensors(self) -> dict[str, Tensor]:
        """The averages under names of their own, as a checkpoint keeps and restores them (in place)."""
        return {f"{self._name}.{name}": average for name, average in self._averages.items()}

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
