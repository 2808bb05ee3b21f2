"""Pairs of forward-process objectives: the final latent of one sample, to be noised to one level, each.

Levels and noise follow from the run's seed, the training step, the group and the sample: they are the same on any
number of ranks and after a resume.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.common.v1.sample_pb2 import Sample, ScoredGroup
from headwater.diffusion.schedules import noised
from headwater_trainer.pairs import PairBatch, Recorded, TrainPair, damaged, numbers, stacked


@dataclass(kw_only=True)
class ForwardPair(TrainPair):
    """A clean latent and the noise it gets (`common.v1.ForwardProcessTerm`)."""

    x0: Tensor  # fp32 [...], shared by the pairs of a sample
    noise_seed: int
    log_likelihood_old: float | None = None  # of the old policy, for an objective with a ratio


@dataclass(kw_only=True)
class ForwardBatch(PairBatch):
    """B noised latents, the clean ones, and the velocity between them."""

    x0: Tensor  # fp32 [B, ...]
    target: Tensor  # fp32 [B, ...], noise - x0
    log_likelihood_old: Tensor | None  # fp32 [B]


def forward_pairs(
    group: ScoredGroup, sample: Sample, recorded: Recorded, *, count: int, seed: tuple[int, int]
) -> Iterable[ForwardPair]:
    """Pairs of one sample at `count` levels of its grid without the terminal 0; `seed` is the run's and the step.

    They carry the conditional branch only: the loss is free of guidance. Raises `DataLoss` without a final latent.
    """
    steps = recorded.step_count
    if steps not in recorded.latents:
        raise damaged(group, sample, "the final latent is not stored")
    own = (*seed, group.group_id, sample.id.index)
    for step in draw_steps(steps, min(count, steps), seed_of(*own, "levels")):
        yield ForwardPair(
            group_id=group.group_id,
            sample_index=sample.id.index,
            step=step,
            timestep=recorded.timesteps[step].item(),
            sigma=recorded.sigmas[step].item(),
            positive=recorded.positive,
            negative={},
            x0=recorded.latents[steps],
            noise_seed=seed_of(*own, "noise", step),
        )


def stack(pairs: Sequence[ForwardPair], weight: float, device: torch.device) -> ForwardBatch:
    """Noise and stack pairs into one batch on `device`, each of `weight`. Noise is drawn on the CPU."""
    fields = stacked(pairs, weight, device)
    x0 = torch.stack([pair.x0 for pair in pairs]).to(device)
    noise = torch.stack([drawn_noise(pair) for pair in pairs]).to(device)
    old = [pair.log_likelihood_old for pair in pairs if pair.log_likelihood_old is not None]
    return ForwardBatch(
        latent=noised(x0, noise, fields["sigma"]),
        x0=x0,
        target=noise - x0,
        log_likelihood_old=numbers(old, device) if len(old) == len(pairs) else None,
        **fields,
    )


def draw_steps(total: int, count: int, seed: int) -> list[int]:
    """`count` different steps out of `total`, increasing."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return sorted(order[:count].tolist())


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^63) that follows from `parts` alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def drawn_noise(pair: ForwardPair) -> Tensor:
    """The noise of a pair, fp32 like its latent, on the CPU."""
    return torch.randn(pair.x0.shape, generator=torch.Generator().manual_seed(pair.noise_seed))
