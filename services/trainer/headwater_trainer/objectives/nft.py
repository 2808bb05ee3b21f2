"""DiffusionNFT (arXiv 2509.16117): contrast an implicit positive with a negative policy on the forward process."""

from headwater.diffusion.losses import mean_per_sample, nft_loss
from headwater_trainer.forward_pairs import ForwardBatch
from headwater_trainer.model import Policy
from headwater_trainer.objectives.forward import ForwardObjective
from headwater_trainer.objectives.terms import Terms


class Nft(ForwardObjective):
    """The `nft` objective."""

    def terms(self, policy: Policy, batch: ForwardBatch) -> Terms:
        """NFT loss of each pair, plus kl_coef times the squared distance to the velocity of the reference."""
        section = self._section
        reference = policy.reference_velocity(batch) if section.kl_coef > 0 else None
        old, new = policy.old_and_new_velocity(batch)
        outcome = nft_loss(
            new, old, batch.latent, batch.x0, batch.sigma, batch.advantage, beta=section.beta, adv_clip=section.adv_clip
        )
        loss = outcome.loss
        means = {
            "loss/positive": outcome.positive,
            "loss/negative": outcome.negative,
            "optimality/mean": outcome.optimality,
            "old_distance": mean_per_sample((new.detach() - old) ** 2),
        }
        if reference is not None:
            kl = mean_per_sample((new - reference) ** 2)
            loss = loss + section.kl_coef * kl
            means["kl_to_reference"] = kl.detach()
        return Terms(loss=loss, means=means)
