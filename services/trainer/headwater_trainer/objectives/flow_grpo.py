"""Flow-GRPO (arXiv 2505.05470): a clipped policy gradient on the stochastic steps of the rollout."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import Recipe
from headwater.diffusion.losses import Guard, TrustRegion, flow_grpo_loss, kl_to_reference, step_divergence
from headwater.diffusion.transitions import Transition, transition
from headwater.tensors.codec import Fetch
from headwater_trainer import transition_pairs
from headwater_trainer.model import Policy
from headwater_trainer.objectives.base import Objective
from headwater_trainer.objectives.terms import Terms, ratio_figures
from headwater_trainer.pairs import pairs_of
from headwater_trainer.ranks import RunFailed
from headwater_trainer.transition_pairs import TransitionBatch, TransitionPair


class FlowGrpo(Objective[TransitionPair, TransitionBatch]):
    """The `flow_grpo` objective."""

    def __init__(self, recipe: Recipe) -> None:
        self._section = recipe.objective
        self._kind = recipe.sampling.transition
        self._noise_level = recipe.sampling.noise_level

    def pairs(self, group: ScoredGroup, indices: Sequence[int], fetch: Fetch, step: int) -> list[TransitionPair]:
        """Each recorded stochastic step of each sample."""
        return pairs_of(group, indices, fetch, transition_pairs.transitions)

    def stack(self, pairs: Sequence[TransitionPair], weight: float, device: torch.device) -> TransitionBatch:
        """See `Objective`."""
        return transition_pairs.stack(pairs, weight, device)

    def terms(self, policy: Policy, batch: TransitionBatch) -> Terms:
        """Clipped loss of each pair, plus kl_coef times the KL to the reference."""
        reference = policy.reference_velocity(batch) if self._section.kl_coef > 0 else None
        step = self._step(batch, policy.velocity(batch))
        log_prob = self._log_prob(step, batch)
        old = self._reduced(batch, batch.log_prob_old)
        guard, trust = self._bounds(step, batch)
        outcome = flow_grpo_loss(
            log_prob, old, batch.advantage, clip_range=self._section.clip_range, adv_clip=self._section.adv_clip,
            guard=guard, trust=trust,
        )  # fmt: skip
        loss = outcome.loss
        means = ratio_figures(outcome)
        if trust is not None:
            means["divergence/mean"] = trust.divergence
            means["divergence/left"] = trust.left(outcome.ratio, batch.advantage).float()
        if reference is not None:
            kl = kl_to_reference(step.mean, self._step(batch, reference).mean, step.noise_scale)
            loss = loss + self._section.kl_coef * kl
            means["kl_to_reference"] = kl.detach()
        drift = (log_prob.detach() - self._reduced(batch, batch.log_prob_engine)).abs()
        return Terms(loss=loss, means=means, maxima={"log_prob_drift/max": drift})

    @torch.no_grad()
    def prepare(self, policy: Policy, pairs: Sequence[TransitionPair], batches: Iterable[TransitionBatch]) -> None:
        """With recompute_old_log_prob: the old log-probs, and means, are the trainer's own before the first update."""
        if not self._section.recompute_old_log_prob:
            return
        waiting = iter(pairs)
        for batch in batches:
            step = self._step(batch, policy.velocity(batch))
            log_probs = step.log_prob(batch.next_latent, "mean").tolist()
            means = step.mean.cpu() if self._section.compares_means else [None] * len(log_probs)
            for log_prob, mean, pair in zip(log_probs, means, waiting, strict=False):
                pair.log_prob_old, pair.mean_old = log_prob, mean

    def check_start(self, values: Mapping[str, float]) -> None:
        """Refuse to go on when engine and trainer disagree about the same weights: the ratio would be noise.

        Only when every group is from the present weights; otherwise policies differ by intent.
        """
        section = self._section
        limit = section.max_log_prob_drift or section.clip_range / 2
        drift = values.get("log_prob_drift/max", 0.0)
        if section.recompute_old_log_prob or values.get("staleness/max", 0.0) > 0 or drift <= limit:
            return
        raise RunFailed(
            f"engine and trainer disagree by {drift:.2g} in log p, the run allows {limit:.2g}. Give rollout workers "
            "the trainer's precision (--precision) and set train.micro_batch_size to the group size; `headwater parity`"
            " shows the difference step by step. To train all the same, set objective.recompute_old_log_prob = true or "
            "raise objective.max_log_prob_drift"
        )

    def _step(self, batch: TransitionBatch, velocity: Tensor) -> Transition:
        return transition(
            self._kind,
            batch.latent,
            velocity,
            sigma=batch.sigma,
            next_sigma=batch.next_sigma,
            sigma_after_first=batch.sigma_after_first,
            noise_level=self._noise_level,
        )

    def _bounds(self, step: Transition, batch: TransitionBatch) -> tuple[Guard | None, TrustRegion | None]:
        """What stands beside, or in place of, the clip. A pair without an old mean is compared with itself."""
        section = self._section
        if not section.compares_means:
            return None, None
        old = step.mean.detach() if batch.mean_old is None else batch.mean_old
        divergence = step_divergence(step.mean, old, step.std)
        guard = Guard(divergence, step.std.flatten(), batch.sigma - batch.next_sigma) if section.guard else None
        threshold = section.dppo_threshold
        return guard, TrustRegion(divergence.detach(), threshold) if threshold is not None else None

    def _log_prob(self, step: Transition, batch: TransitionBatch) -> Tensor:
        return step.log_prob(batch.next_latent, self._section.log_prob_reduction)

    def _reduced(self, batch: TransitionBatch, log_prob_mean: Tensor) -> Tensor:
        """Recorded log-probs are means; the sum is that times the number of dimensions."""
        if self._section.log_prob_reduction == "mean":
            return log_prob_mean
        return log_prob_mean * float(math.prod(batch.latent.shape[1:]))
