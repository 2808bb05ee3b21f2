"""Pairs of policy-gradient objectives: one recorded stochastic step of one sample each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.common.v1.sample_pb2 import Sample, ScoredGroup
from headwater_trainer.pairs import PairBatch, Recorded, TrainPair, damaged, numbers, stacked


@dataclass(kw_only=True)
class TransitionPair(TrainPair):
    """One recorded transition (`common.v1.PolicyGradientTerm`)."""

    latent: Tensor  # fp32 [...]
    next_latent: Tensor  # fp32 [...]
    next_sigma: float
    sigma_after_first: float
    log_prob_engine: float  # as recorded by the rollout, mean over the latent's dimensions
    log_prob_old: float  # of the old policy: the engine's, unless the trainer recomputed it
    mean_old: Tensor | None = None  # fp32 [...], of the old policy's step, where the objective compares means


@dataclass(kw_only=True)
class TransitionBatch(PairBatch):
    """B transitions; `latent` is the one before the step."""

    next_latent: Tensor  # fp32 [B, ...]
    next_sigma: Tensor  # fp32 [B]
    sigma_after_first: Tensor  # fp32 [B]
    log_prob_engine: Tensor  # fp32 [B]
    log_prob_old: Tensor  # fp32 [B]
    mean_old: Tensor | None = None  # fp32 [B, ...]


def transitions(group: ScoredGroup, sample: Sample, recorded: Recorded) -> Iterable[TransitionPair]:
    """The pairs of one sample. Raises `DataLoss` when a latent that they need is missing."""
    latents = recorded.latents
    for order, step in enumerate(sample.trajectory.trained_steps):
        if step not in latents or step + 1 not in latents or step >= recorded.step_count:
            raise damaged(group, sample, f"the latents around step {step} are not stored")
        yield TransitionPair(
            group_id=group.group_id,
            sample_index=sample.id.index,
            step=step,
            latent=latents[step],
            next_latent=latents[step + 1],
            timestep=recorded.timesteps[step].item(),
            sigma=recorded.sigmas[step].item(),
            next_sigma=recorded.sigmas[step + 1].item(),
            sigma_after_first=recorded.sigmas[1].item(),
            log_prob_engine=recorded.log_probs[order].item(),
            log_prob_old=recorded.log_probs[order].item(),
            positive=recorded.positive,
            negative=recorded.negative,
        )


def stack(pairs: Sequence[TransitionPair], weight: float, device: torch.device) -> TransitionBatch:
    """Stack pairs into one batch on `device`, each of `weight`."""
    means = [pair.mean_old for pair in pairs if pair.mean_old is not None]
    return TransitionBatch(
        mean_old=torch.stack(means).to(device) if len(means) == len(pairs) else None,
        latent=torch.stack([pair.latent for pair in pairs]).to(device),
        next_latent=torch.stack([pair.next_latent for pair in pairs]).to(device),
        next_sigma=numbers([pair.next_sigma for pair in pairs], device),
        sigma_after_first=numbers([pair.sigma_after_first for pair in pairs], device),
        log_prob_engine=numbers([pair.log_prob_engine for pair in pairs], device),
        log_prob_old=numbers([pair.log_prob_old for pair in pairs], device),
        **stacked(pairs, weight, device),
    )
