"""Pairs of preference objectives: two samples of one group, of which one has the higher reward, at one noise level.

Levels and noise follow from the run's seed, the training step, the group and the preferred sample: they are the same on
any number of ranks and after a resume.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.common.v1.sample_pb2 import Sample, ScoredGroup
from headwater.diffusion.schedules import noised
from headwater.tensors.codec import Fetch
from headwater_trainer.forward_pairs import ForwardPair, drawn_noise, forward_pairs
from headwater_trainer.pairs import PairBatch, Recorded, damaged, loaded_conditionings, stacked


@dataclass(kw_only=True)
class PreferencePair(ForwardPair):
    """A preferred clean latent `x0`, the other one, and the noise that both get (`common.v1.PreferenceTerm`)."""

    rejected: Tensor  # fp32 [...]
    rejected_index: int


@dataclass(kw_only=True)
class PreferenceBatch(PairBatch):
    """B pairs as 2 B rows of the model's input, first the preferred latents, then the others; `weight` is [B]."""

    target: Tensor  # fp32 [2 B, ...], noise - x0


def ranked(rewards: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Up to `count` (preferred, other) indices: best and worst, second best and second worst, … while they differ."""
    order = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))
    pairs = zip(order, reversed(order), strict=True)
    return [(good, bad) for good, bad in pairs if rewards[good] > rewards[bad]][: min(count, len(order) // 2)]


def preference_pairs(
    group: ScoredGroup, chosen: Iterable[tuple[int, int]], fetch: Fetch, *, count: int, seed: tuple[int, int]
) -> list[PreferencePair]:
    """Each (preferred, other) at `count` levels of the preferred sample's grid; `seed` is the run's and the step.

    Raises `DataLoss` and the errors of the blob store for a trajectory that cannot be used.
    """
    conditionings = loaded_conditionings(group, fetch)

    def read(index: int) -> tuple[Sample, Recorded]:
        return group.samples[index], Recorded.read(group, group.samples[index], conditionings, fetch)

    found = []
    for good, bad in chosen:
        rejected, recorded = read(bad)
        if recorded.step_count not in recorded.latents:
            raise damaged(group, rejected, "the final latent is not stored")
        other = recorded.latents[recorded.step_count]
        for pair in forward_pairs(group, *read(good), count=count, seed=seed):
            if other.shape != pair.x0.shape:
                raise damaged(group, rejected, f"latent of shape {tuple(other.shape)}, not {tuple(pair.x0.shape)}")
            found.append(PreferencePair(**vars(pair), rejected=other, rejected_index=bad))
    return sorted(found, key=lambda pair: (pair.step, pair.sample_index))


def stack(pairs: Sequence[PreferencePair], weight: float, device: torch.device) -> PreferenceBatch:
    """Noise and stack pairs into one batch on `device`, each of `weight`. Noise is drawn on the CPU."""
    fields = stacked([*pairs, *pairs], weight, device)
    fields["weight"] = fields["weight"][: len(pairs)]
    x0 = torch.stack([*(pair.x0 for pair in pairs), *(pair.rejected for pair in pairs)]).to(device)
    noise = torch.stack([drawn_noise(pair) for pair in pairs]).to(device).repeat(2, *[1] * (x0.ndim - 1))
    return PreferenceBatch(latent=noised(x0, noise, fields["sigma"]), target=noise - x0, **fields)
