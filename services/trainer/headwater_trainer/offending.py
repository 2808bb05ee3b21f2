"""What a skipped update was made of: the worst training pair, written for a person as safetensors and JSON."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from headwater_trainer.pairs import TrainPair

log = logging.getLogger(__name__)

KEPT = 20  # files of a rank; a run that goes wrong at every step must not fill the disk


class Worst:
    """The pair of this rank with the worst loss: not finite, else the largest."""

    def __init__(self) -> None:
        self.pair: TrainPair | None = None
        self.loss = 0.0
        self._size = -1.0

    def see(self, pairs: Sequence[TrainPair], losses: Tensor) -> None:
        """Look at the `losses` [B] of a micro-batch; `pairs` may be fewer, where the rest only fills it up."""
        losses = losses.detach()
        sizes = torch.nan_to_num(losses.abs(), nan=math.inf, posinf=math.inf)[: len(pairs)]
        if len(sizes) and float(sizes.max()) > self._size:
            index = int(sizes.argmax())
            self.pair, self.loss, self._size = pairs[index], float(losses[index]), float(sizes[index])


def dump(folder: Path, name: str, worst: Worst, figures: Mapping[str, float]) -> None:
    """Write `<name>.safetensors` with the tensors of the worst pair, and `<name>.json` with its numbers and `figures`.

    A disk that is full costs the dump, not the run.
    """
    if worst.pair is None:
        return
    tensors, numbers = {}, {}
    for field, value in vars(worst.pair).items():
        if isinstance(value, Tensor):
            tensors[field] = value.contiguous().clone()
        elif isinstance(value, Mapping):
            tensors |= {f"{field}.{key}": tensor.contiguous().clone() for key, tensor in value.items()}
        else:
            numbers[field] = value
    content = {"pair": numbers, "pair_loss": worst.loss, "figures": dict(figures)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob("*.json"))) >= KEPT:
            return
        save_file(tensors, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")  # NaN is written as NaN
    except OSError as error:
        log.warning("the pair of a skipped update is not written to %s: %s", folder, error)
