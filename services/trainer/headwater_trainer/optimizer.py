"""AdamW over the trainable, sharded parameters, and its learning rate."""

import math

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
        fused=policy.device.type == "cuda",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, section: OptimizerSection, step: int, total: int) -> float:
    """Set and return the learning rate of `step` (0-based) of `total`: a function of the step, so resume is exact."""
    rate = section.lr * schedule_factor(section, step, total)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def schedule_factor(section: OptimizerSection, step: int, total: int) -> float:
    """The share of `lr` at `step` of `total`, in [0, 1]."""
    if section.schedule == "one_cycle":
        rise = 0.3 * total
        if step < rise:
            return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * step / rise)) / 2
        return (1 + math.cos(math.pi * (step - rise) / (total - rise))) / 2
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * (step - section.warmup_steps) / max(1, total - section.warmup_steps))) / 2
