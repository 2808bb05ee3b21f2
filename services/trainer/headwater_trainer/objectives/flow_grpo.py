"""Flow-GRPO (arXiv 2505.05470): a clipped policy gradient on the stochastic steps of the rollout."""

import math

import torch
from torch import Tensor

from headwater.config.recipe import Recipe
from headwater.diffusion.losses import flow_grpo_loss, kl_to_reference
from headwater.diffusion.transitions import Transition, transition
from headwater_trainer.model import Policy
from headwater_trainer.objectives.terms import Terms
from headwater_trainer.pairs import PairBatch


class FlowGrpo:
    """The `flow_grpo` objective."""

    def __init__(self, recipe: Recipe) -> None:
        self._section = recipe.objective
        self._kind = recipe.sampling.transition
        self._noise_level = recipe.sampling.noise_level

    def terms(self, policy: Policy, batch: PairBatch) -> Terms:
        """Clipped loss of each pair, plus kl_coef times the KL to the reference."""
        step = self._step(batch, policy.velocity(batch))
        log_prob = self._log_prob(step, batch)
        old = self._reduced(batch, batch.log_prob_old)
        outcome = flow_grpo_loss(
            log_prob, old, batch.advantage, clip_range=self._section.clip_range, adv_clip=self._section.adv_clip
        )
        loss = outcome.loss
        means = {
            "ratio/mean": outcome.ratio,
            "ratio/abs_deviation": (outcome.ratio - 1).abs(),
            "approx_kl": outcome.approx_kl,
            "clip_fraction/up": outcome.clipped_up.float(),
            "clip_fraction/down": outcome.clipped_down.float(),
        }
        if self._section.kl_coef > 0:
            reference = self._step(batch, policy.reference_velocity(batch))
            kl = kl_to_reference(step.mean, reference.mean, step.noise_scale)
            loss = loss + self._section.kl_coef * kl
            means["kl_to_reference"] = kl.detach()
        drift = (log_prob.detach() - self._reduced(batch, batch.log_prob_engine)).abs()
        return Terms(loss=loss, means=means, maxima={"log_prob_drift/max": drift})

    @torch.no_grad()
    def old_log_probs(self, policy: Policy, batch: PairBatch) -> Tensor:
        """As recorded by the engine: means over the latent's dimensions, whatever the loss uses."""
        return self._step(batch, policy.velocity(batch)).log_prob(batch.next_latent, "mean")

    def _step(self, batch: PairBatch, velocity: Tensor) -> Transition:
        return transition(
            self._kind,
            batch.latent,
            velocity,
            sigma=batch.sigma,
            next_sigma=batch.next_sigma,
            sigma_after_first=batch.sigma_after_first,
            noise_level=self._noise_level,
        )

    def _log_prob(self, step: Transition, batch: PairBatch) -> Tensor:
        return step.log_prob(batch.next_latent, self._section.log_prob_reduction)

    def _reduced(self, batch: PairBatch, log_prob_mean: Tensor) -> Tensor:
        """Recorded log-probs are means; the sum is that times the number of dimensions."""
        if self._section.log_prob_reduction == "mean":
            return log_prob_mean
        return log_prob_mean * float(math.prod(batch.latent.shape[1:]))
