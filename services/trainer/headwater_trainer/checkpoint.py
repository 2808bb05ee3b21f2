"""Checkpoints by torch.distributed.checkpoint, as safetensors and JSON: nothing in them is pickled.

A checkpoint is a folder `step_<n>`: model/ and optimizer/ hold each rank's shards (any number of ranks can load them),
rng_<rank>.safetensors the random state of each rank, state.json the step, the data cursor and the counters, and
recipe.toml the resolved recipe. It is written under a temporary name and renamed when all of it is on disk.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from headwater_trainer.groups import Cursor
from headwater_trainer.ranks import Ranks

_PREFIX = "step_"


@dataclass
class TrainState:
    """The numbers of a run that a checkpoint holds beside tensors."""

    step: int = 0
    updates: int = 0  # optimizer updates made
    skipped: int = 0  # updates skipped because something was not finite
    cursor: Cursor = field(default_factory=Cursor)
    grad_norms: list[float] = field(default_factory=list)  # of the last updates


class Checkpoints:
    """The checkpoints of one run. All ranks call every method together."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._keep = keep
        ranks.first_only("create the checkpoint folder", self._prepare)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, as rank 0 sees it."""
        found = list_checkpoints(self._folder) if self._ranks.is_first else []
        name = self._ranks.broadcast((found[-1].name if found else "").encode() if self._ranks.is_first else None)
        return self._folder / name.decode() if name else None

    def roll_back(self, step: int) -> Path | None:
        """Remove the checkpoints after `step`, but for the oldest; the newest that is left, as rank 0 sees it."""

        def remove() -> None:
            for path in list_checkpoints(self._folder)[1:]:
                if int(path.name.removeprefix(_PREFIX)) > step:
                    shutil.rmtree(path)

        self._ranks.first_only("remove later checkpoints", remove)
        return self.latest()

    def save(
        self, state: TrainState, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, recipe: str
    ) -> Path:
        """Write a checkpoint; it is durable when this returns. One of the same step is replaced.

        `parameters` may hold plain tensors beside the optimizer's own, such as a moving average.
        """
        final = self._folder / f"{_PREFIX}{state.step:08d}"
        temporary = self._folder / f".tmp-{final.name}"
        ranks = self._ranks
        ranks.first_only("create a checkpoint", lambda: _empty(temporary))
        dcp.save(
            _model_tensors(parameters), storage_writer=HuggingFaceStorageWriter(str(temporary / "model"), None, 1, True)
        )
        moments = _moments(parameters, optimizer)
        if moments:
            dcp.save(moments, storage_writer=HuggingFaceStorageWriter(str(temporary / "optimizer"), None, 1, True))
        ranks.together("write random state", lambda: _save_rng(temporary / f"rng_{ranks.rank}.safetensors"))

        def publish() -> None:
            (temporary / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
            (temporary / "recipe.toml").write_text(recipe, encoding="utf-8")
            _sync(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            _sync_folder(self._folder)
            for old in list_checkpoints(self._folder)[: -self._keep]:
                shutil.rmtree(old)

        ranks.first_only("publish a checkpoint", publish)
        return final

    def load(self, path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> TrainState:
        """Restore parameters and optimizer in place, and this rank's random state; returns the numbers."""
        tensors = _model_tensors(parameters)
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path / "model")))
        raw = json.loads((path / "state.json").read_text(encoding="utf-8"))
        state = TrainState(
            raw["step"], raw["updates"], raw["skipped"], Cursor(**raw["cursor"]), raw.get("grad_norms", [])
        )
        if state.updates:
            _create_moments(parameters, optimizer, state.updates)
            dcp.load(_moments(parameters, optimizer), storage_reader=HuggingFaceStorageReader(str(path / "optimizer")))
        rng = path / f"rng_{self._ranks.rank}.safetensors"
        if rng.exists():  # a run may continue on more ranks than it was saved by
            _load_rng(rng)
        return state

    def _prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(".tmp-*"):
            shutil.rmtree(left)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / "state.json").is_file())


def _model_tensors(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _moments(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """AdamW's moments by parameter; its step counts are equal for all and kept in TrainState.updates."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in ("exp_avg", "exp_avg_sq")
    }


def _create_moments(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, updates: int) -> None:
    for parameter in (value for value in parameters.values() if isinstance(value, nn.Parameter)):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(updates)),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }


def _save_rng(path: Path) -> None:
    state: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    save_file(state, path)


def _load_rng(path: Path) -> None:
    state = load_file(path)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
