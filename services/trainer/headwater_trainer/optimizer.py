"""AdamW over the trainable, sharded parameters."""

import torch

from headwater.config.recipe import OptimizerSection
from headwater_trainer.model import Policy


def make_optimizer(policy: Policy, section: OptimizerSection) -> torch.optim.AdamW:
    """The optimizer of a policy."""
    return torch.optim.AdamW(
        policy.trainable().values(),
        lr=section.lr,
        betas=(section.betas[0], section.betas[1]),
        weight_decay=section.weight_decay,
        eps=section.eps,
    )
