"""Training pairs: what one loss term of one sample needs. The kinds are in `*_pairs`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwater.common.v1.sample_pb2 import Sample, ScoredGroup, Trajectory
from headwater.common.v1.tensor_pb2 import NamedTensor
from headwater.errors import DataLoss
from headwater.tensors import torch_codec
from headwater.tensors.codec import Fetch


@dataclass(kw_only=True)
class TrainPair:
    """What the pairs of every objective have (`common.v1.TrainPair` with its tensors loaded), on the CPU."""

    group_id: str
    sample_index: int
    step: int  # of the trajectory, 0-based
    timestep: float  # as the model was given it
    sigma: float
    advantage: float = 0.0  # filled in when the rewards of the whole batch are known
    positive: Mapping[str, Tensor]  # conditioning without batch dimension
    negative: Mapping[str, Tensor]  # empty without guidance


@dataclass(kw_only=True)
class PairBatch:
    """B pairs, stacked, on the device of the model: a `ModelInput`. Pairs of weight 0 only keep the ranks in step."""

    latent: Tensor  # fp32 [B, ...], at noise level sigma
    timestep: Tensor  # fp32 [B]
    sigma: Tensor  # fp32 [B]
    advantage: Tensor  # fp32 [B]
    weight: Tensor  # fp32 [B], 1 or 0
    positive: Mapping[str, Tensor]  # [B, ...]
    negative: Mapping[str, Tensor]


Pair = TypeVar("Pair", bound=TrainPair)
Batch = TypeVar("Batch", bound=PairBatch)
Conditionings = Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]  # id -> positive, negative


def pairs_of(
    group: ScoredGroup,
    indices: Sequence[int],
    fetch: Fetch,
    of_sample: Callable[[ScoredGroup, Sample, "Recorded"], Iterable[Pair]],
) -> list[Pair]:
    """The pairs that `of_sample` makes of the samples at `indices`, ordered by step, then sample.

    This order makes a micro-batch of the group's size hold what the engine ran as one batch, so that even kernels
    whose rounding depends on the batch shape give the engine's numbers. Raises `DataLoss` and the errors of the blob
    store for a trajectory that cannot be used.
    """
    conditionings = loaded_conditionings(group, fetch)
    samples = [group.samples[index] for index in indices]
    pairs = [
        pair
        for sample in samples
        for pair in of_sample(group, sample, Recorded.read(group, sample, conditionings, fetch))
    ]
    return sorted(pairs, key=lambda pair: (pair.step, pair.sample_index))


def loaded_conditionings(group: ScoredGroup, fetch: Fetch) -> Conditionings:
    """The conditionings of a group by id."""
    return {item.id: (_tensors(item.positive, fetch), _tensors(item.negative, fetch)) for item in group.conditionings}


@dataclass
class Recorded:
    """The tensors of a trajectory of T steps, checked: K stored latents, W stochastic steps."""

    latents: Mapping[int, Tensor]  # fp32 [...] by position; position T is the final latent
    timesteps: Tensor  # fp32 [T+1]
    sigmas: Tensor  # fp32 [T+1]
    log_probs: Tensor  # fp32 [W]
    positive: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]

    @property
    def step_count(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    @classmethod
    def read(cls, group: ScoredGroup, sample: Sample, conditionings: Conditionings, fetch: Fetch) -> "Recorded":
        """Load the trajectory of a sample. Raises `DataLoss` when it is damaged."""
        trajectory: Trajectory = sample.trajectory
        if trajectory.conditioning_id not in conditionings:
            raise damaged(group, sample, f"conditioning {trajectory.conditioning_id!r} is not in the group")
        names = ("latents", "timesteps", "sigmas", "log_probs")
        tensors = [torch_codec.decode(getattr(trajectory, name), fetch, field=f"trajectory.{name}") for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype != torch.float32:
                raise damaged(group, sample, f"{name} is {tensor.dtype}; float32 is expected")
            if not bool(torch.isfinite(tensor).all()):
                raise damaged(group, sample, f"{name} holds values that are not finite")
        latents, timesteps, sigmas, log_probs = tensors
        lengths = (len(trajectory.latent_positions), len(sigmas), len(trajectory.trained_steps))
        found = (len(latents), len(timesteps), len(log_probs))
        if lengths != found or lengths[1] < 2:
            raise damaged(group, sample, f"latents, timesteps and log_probs have {found} rows, not {lengths}")
        by_position = dict(zip(trajectory.latent_positions, latents, strict=True))
        return cls(by_position, timesteps, sigmas, log_probs, *conditionings[trajectory.conditioning_id])


def damaged(group: ScoredGroup, sample: Sample, why: str) -> DataLoss:
    """The error for a sample that cannot be used."""
    return DataLoss(f"group {group.group_id} sample {sample.id.index}: {why}", reason="TRAJECTORY_UNUSABLE")


def _tensors(named: Iterable[NamedTensor], fetch: Fetch) -> Mapping[str, Tensor]:
    return {item.name: torch_codec.decode(item.tensor, fetch, field=f"conditioning.{item.name}") for item in named}


Stack = Callable[[Sequence[Pair], float, torch.device], Batch]  # pairs, weight of each, device


def micro_batches(
    pairs: Sequence[Pair], size: int, count: int, filler: Pair | None, device: torch.device, stack: "Stack[Pair, Batch]"
) -> Iterable[Batch]:
    """`count` micro-batches of at most `size` pairs; missing ones are made of `filler` (default: the last) at weight 0.

    FSDP needs the same number of forward passes on every rank, also where a rank has fewer pairs.
    """
    for start in range(0, count * size, size):
        chunk = list(pairs[start : start + size])
        weight = 1.0 if chunk else 0.0
        if not chunk:
            spare = pairs[-1] if pairs else filler
            assert spare is not None, "a rank without pairs needs a filler"
            chunk = [spare]
        yield stack(chunk, weight, device)


def stacked(pairs: Sequence[TrainPair], weight: float, device: torch.device) -> dict[str, Any]:
    """The fields of `PairBatch` but the latent, on `device`. Conditioning tensors must have equal shapes."""

    def conditioning(read: Callable[[TrainPair], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return {name: torch.stack([read(pair)[name] for pair in pairs]).to(device) for name in read(pairs[0])}

    return {
        "timestep": numbers([pair.timestep for pair in pairs], device),
        "sigma": numbers([pair.sigma for pair in pairs], device),
        "advantage": numbers([pair.advantage for pair in pairs], device),
        "weight": torch.full((len(pairs),), weight, device=device),
        "positive": conditioning(lambda pair: pair.positive),
        "negative": conditioning(lambda pair: pair.negative),
    }


def numbers(values: Sequence[float], device: torch.device) -> Tensor:
    """fp32 [B] on `device`."""
    return torch.tensor(values, dtype=torch.float32, device=device)
