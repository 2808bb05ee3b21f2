"""Forward and backward pass as one CUDA graph: a small model spends most of a step on launching kernels."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_WARM_UPS = 3

LossOf = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]  # inputs -> (scalar with gradient, figures)


class GraphedPass:
    """Records `loss_of(inputs)` and its backward pass once and replays it.

    `inputs` are tensors by name; each call must have the shapes of the first. Gradients of `parameters` are overwritten
    by every call. One process, and no other backward pass in between.
    """

    def __init__(self, loss_of: LossOf, parameters: list[Tensor]) -> None:
        self._loss_of = loss_of
        self._parameters = parameters
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._figures = torch.zeros(0)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Forward and backward; the figures, valid until the next call."""
        if self._graph is None:
            self._record(inputs)
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        assert self._graph is not None
        self._graph.replay()
        return self._figures

    def _record(self, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._forget_gradients()
                self._loss_of(self._inputs)[0].backward()
        torch.cuda.current_stream().wait_stream(side)
        self._forget_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss, self._figures = self._loss_of(self._inputs)
            loss.backward()
        self._graph = graph

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
