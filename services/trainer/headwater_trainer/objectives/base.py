"""What an objective is: how scored groups become pairs, and what loss the pairs give."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

import torch

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.tensors.codec import Fetch
from headwater_trainer.model import Policy
from headwater_trainer.objectives.terms import Terms
from headwater_trainer.pairs import Batch, Pair


class Objective(ABC, Generic[Pair, Batch]):
    """A loss over training pairs of one kind. All ranks call every method together."""

    @abstractmethod
    def pairs(self, group: ScoredGroup, indices: Sequence[int], fetch: Fetch, step: int) -> list[Pair]:
        """The pairs of the samples at `indices` for the training step after `step` steps, without advantages.

        Raises `DataLoss` and the errors of the blob store for a sample that cannot be used.
        """

    @abstractmethod
    def stack(self, pairs: Sequence[Pair], weight: float, device: torch.device) -> Batch:
        """The pairs as one batch on `device`, each of `weight`."""

    @abstractmethod
    def terms(self, policy: Policy, batch: Batch) -> Terms:
        """Loss and figures of each pair of the batch, with gradients."""

    def prepare(self, policy: Policy, pairs: Sequence[Pair], batches: Iterable[Batch]) -> None:
        """Complete `pairs`, of which `batches` are made, before the first update of a step. By default nothing."""

    def check_start(self, values: Mapping[str, float]) -> None:
        """Raise `RunFailed` when the figures of a process's first step forbid to go on. By default nothing does."""
