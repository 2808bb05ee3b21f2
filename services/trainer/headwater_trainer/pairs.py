"""From a scored group to training pairs: one recorded transition of one sample each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.common.v1.sample_pb2 import Conditioning, Sample, ScoredGroup, Trajectory
from headwater.common.v1.tensor_pb2 import NamedTensor
from headwater.errors import DataLoss
from headwater.tensors import torch_codec
from headwater.tensors.codec import Fetch


@dataclass
class TrainPair:
    """One recorded transition (`common.v1.PolicyGradientTerm` with its tensors loaded), on the CPU."""

    group_id: str
    sample_index: int
    step: int  # of the trajectory, 0-based
    latent: Tensor  # fp32 [...]
    next_latent: Tensor  # fp32 [...]
    timestep: float  # as the model was given it
    sigma: float
    next_sigma: float
    sigma_after_first: float
    log_prob_engine: float  # as recorded by the rollout, mean over the latent's dimensions
    log_prob_old: float  # of the old policy: the engine's, unless the trainer recomputed it
    advantage: float
    positive: Mapping[str, Tensor]  # conditioning without batch dimension
    negative: Mapping[str, Tensor]  # empty without guidance


@dataclass
class PairBatch:
    """B pairs, stacked, on the device of the model. Pairs of weight 0 only keep the ranks in step."""

    latent: Tensor  # fp32 [B, ...]
    next_latent: Tensor  # fp32 [B, ...]
    timestep: Tensor  # fp32 [B]
    sigma: Tensor  # fp32 [B]
    next_sigma: Tensor  # fp32 [B]
    sigma_after_first: Tensor  # fp32 [B]
    log_prob_engine: Tensor  # fp32 [B]
    log_prob_old: Tensor  # fp32 [B]
    advantage: Tensor  # fp32 [B]
    weight: Tensor  # fp32 [B], 1 or 0
    positive: Mapping[str, Tensor]  # [B, ...]
    negative: Mapping[str, Tensor]


def pairs_of(group: ScoredGroup, indices: Sequence[int], fetch: Fetch) -> list[TrainPair]:
    """The pairs of the samples at `indices`, ordered by step, then sample; their advantages are still 0.

    This order makes a micro-batch of the group's size hold what the engine ran as one batch, so that even kernels
    whose rounding depends on the batch shape give the engine's numbers. Raises `DataLoss` and the errors of the blob
    store for a trajectory that cannot be used.
    """
    conditionings = {item.id: _conditioning(item, fetch) for item in group.conditionings}
    by_sample = []
    for index in indices:
        sample = group.samples[index]
        if sample.trajectory.conditioning_id not in conditionings:
            raise _damaged(group, index, f"conditioning {sample.trajectory.conditioning_id!r} is not in the group")
        positive, negative = conditionings[sample.trajectory.conditioning_id]
        by_sample.append(list(_transitions(group, sample, positive, negative, fetch)))
    return sorted((pair for pairs in by_sample for pair in pairs), key=lambda pair: (pair.step, pair.sample_index))


def _transitions(
    group: ScoredGroup,
    sample: Sample,
    positive: Mapping[str, Tensor],
    negative: Mapping[str, Tensor],
    fetch: Fetch,
) -> Iterable[TrainPair]:
    recorded = _Recorded.read(group, sample, fetch)
    position_of = {position: row for row, position in enumerate(sample.trajectory.latent_positions)}
    for order, step in enumerate(sample.trajectory.trained_steps):
        if step not in position_of or step + 1 not in position_of or step + 1 >= len(recorded.sigmas):
            raise _damaged(group, sample.id.index, f"the latents around step {step} are not stored")
        yield TrainPair(
            group_id=group.group_id,
            sample_index=sample.id.index,
            step=step,
            latent=recorded.latents[position_of[step]],
            next_latent=recorded.latents[position_of[step + 1]],
            timestep=recorded.timesteps[step].item(),
            sigma=recorded.sigmas[step].item(),
            next_sigma=recorded.sigmas[step + 1].item(),
            sigma_after_first=recorded.sigmas[1].item(),
            log_prob_engine=recorded.log_probs[order].item(),
            log_prob_old=recorded.log_probs[order].item(),
            advantage=0.0,
            positive=positive,
            negative=negative,
        )


@dataclass
class _Recorded:
    """The tensors of a trajectory, checked."""

    latents: Tensor
    timesteps: Tensor
    sigmas: Tensor
    log_probs: Tensor

    @classmethod
    def read(cls, group: ScoredGroup, sample: Sample, fetch: Fetch) -> "_Recorded":
        trajectory: Trajectory = sample.trajectory
        names = ("latents", "timesteps", "sigmas", "log_probs")
        tensors = [torch_codec.decode(getattr(trajectory, name), fetch, field=f"trajectory.{name}") for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype != torch.float32:
                raise _damaged(group, sample.id.index, f"{name} is {tensor.dtype}; float32 is expected")
            if not bool(torch.isfinite(tensor).all()):
                raise _damaged(group, sample.id.index, f"{name} holds values that are not finite")
        recorded = cls(*tensors)
        lengths = (len(trajectory.latent_positions), len(recorded.sigmas), len(trajectory.trained_steps))
        found = (len(recorded.latents), len(recorded.timesteps), len(recorded.log_probs))
        if lengths != found or lengths[1] < 2:
            raise _damaged(group, sample.id.index, f"latents, timesteps and log_probs have {found} rows, not {lengths}")
        return recorded


def _conditioning(item: Conditioning, fetch: Fetch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    return _tensors(item.positive, fetch), _tensors(item.negative, fetch)


def _tensors(named: Iterable[NamedTensor], fetch: Fetch) -> Mapping[str, Tensor]:
    return {item.name: torch_codec.decode(item.tensor, fetch, field=f"conditioning.{item.name}") for item in named}


def _damaged(group: ScoredGroup, index: int, why: str) -> DataLoss:
    return DataLoss(f"group {group.group_id} sample {index}: {why}", reason="TRAJECTORY_UNUSABLE")


def micro_batches(
    pairs: Sequence[TrainPair], size: int, count: int, filler: TrainPair | None, device: torch.device
) -> Iterable[PairBatch]:
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


def stack(pairs: Sequence[TrainPair], weight: float, device: torch.device) -> PairBatch:
    """Stack pairs into one batch on `device`. Conditioning tensors must have equal shapes."""

    def numbers(read: Callable[[TrainPair], float]) -> Tensor:
        return torch.tensor([read(pair) for pair in pairs], dtype=torch.float32, device=device)

    def tensors(read: Callable[[TrainPair], Tensor]) -> Tensor:
        return torch.stack([read(pair) for pair in pairs]).to(device)

    def conditioning(read: Callable[[TrainPair], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return {name: torch.stack([read(pair)[name] for pair in pairs]).to(device) for name in read(pairs[0])}

    return PairBatch(
        latent=tensors(lambda pair: pair.latent),
        next_latent=tensors(lambda pair: pair.next_latent),
        timestep=numbers(lambda pair: pair.timestep),
        sigma=numbers(lambda pair: pair.sigma),
        next_sigma=numbers(lambda pair: pair.next_sigma),
        sigma_after_first=numbers(lambda pair: pair.sigma_after_first),
        log_prob_engine=numbers(lambda pair: pair.log_prob_engine),
        log_prob_old=numbers(lambda pair: pair.log_prob_old),
        advantage=numbers(lambda pair: pair.advantage),
        weight=torch.full((len(pairs),), weight, device=device),
        positive=conditioning(lambda pair: pair.positive),
        negative=conditioning(lambda pair: pair.negative),
    )
