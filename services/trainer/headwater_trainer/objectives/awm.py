"""AWM (arXiv 2509.25050): a clipped policy gradient whose log-probability is minus the flow-matching loss."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headwater.config.recipe import Recipe
from headwater.diffusion.losses import awm_log_likelihood, flow_grpo_loss, mean_per_sample
from headwater_trainer.forward_pairs import ForwardBatch, ForwardPair
from headwater_trainer.model import Policy
from headwater_trainer.objectives.forward import ForwardObjective
from headwater_trainer.objectives.terms import Terms, ratio_figures


class Awm(ForwardObjective):
    """The `awm` objective."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._several_updates = recipe.train.updates_per_batch > 1

    def terms(self, policy: Policy, batch: ForwardBatch) -> Terms:
        """Clipped loss of each pair, plus kl_coef times the squared distance to the velocity of the reference."""
        section = self._section
        reference = policy.reference_velocity(batch) if section.kl_coef > 0 else None
        velocity = policy.velocity(batch)
        likelihood = self._log_likelihood(velocity, batch)
        old = likelihood.detach() if batch.log_likelihood_old is None else batch.log_likelihood_old
        outcome = flow_grpo_loss(
            likelihood, old, batch.advantage, clip_range=section.clip_range, adv_clip=section.adv_clip
        )
        loss = outcome.loss
        means = {**ratio_figures(outcome), "log_likelihood/mean": likelihood.detach()}
        if reference is not None:
            kl = mean_per_sample((velocity - reference) ** 2)
            loss = loss + section.kl_coef * kl
            means["kl_to_reference"] = kl.detach()
        return Terms(loss=loss, means=means)

    @torch.no_grad()
    def prepare(self, policy: Policy, pairs: Sequence[ForwardPair], batches: Iterable[ForwardBatch]) -> None:
        """The old likelihood is that before the first update of the step; with one update, that of the loss itself."""
        if not self._several_updates:
            return
        waiting = iter(pairs)
        for batch in batches:
            likelihoods = self._log_likelihood(policy.velocity(batch), batch).tolist()
            for likelihood, pair in zip(likelihoods, waiting, strict=False):
                pair.log_likelihood_old = likelihood

    def _log_likelihood(self, velocity: Tensor, batch: ForwardBatch) -> Tensor:
        return awm_log_likelihood(velocity, batch.target, batch.sigma, self._section.weighting)
