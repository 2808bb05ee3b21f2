"""`[objective]` of a recipe, and which keys of a recipe which objective reads."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel

from headwater.config.section import NotNegativeFloat, Positive, PositiveFloat, Section
from headwater.errors import InvalidArgument

ObjectiveName = Literal["flow_grpo", "nft", "awm", "dpo", "sft"]
_ADVANTAGE: tuple[ObjectiveName, ...] = ("flow_grpo", "nft", "awm")
_ROLLOUT: tuple[ObjectiveName, ...] = (*_ADVANTAGE, "dpo")

# Keys that not every objective reads. A recipe may write them out, but not change them, for any other.
_READ_BY: Mapping[str, tuple[ObjectiveName, ...]] = {
    "sampling.transition": ("flow_grpo",),
    "sampling.noise_level": ("flow_grpo",),
    "sampling.step_strategy": ("flow_grpo",),
    "sampling.random_candidates": ("flow_grpo",),
    "sampling.random_count": ("flow_grpo",),
    "sampling.window_stride": ("flow_grpo",),
    "sampling.window_every": ("flow_grpo",),
    "sampling.window_size": ("flow_grpo",),
    "sampling.window_begin": ("flow_grpo",),
    "sampling.window_end": ("flow_grpo",),
    "objective.clip_range": ("flow_grpo", "awm"),
    "objective.log_prob_reduction": ("flow_grpo",),
    "objective.recompute_old_log_prob": ("flow_grpo",),
    "objective.max_log_prob_drift": ("flow_grpo",),
    "objective.guard": ("flow_grpo",),
    "objective.dppo_threshold": ("flow_grpo",),
    "objective.beta": ("nft",),
    "objective.old_decay": ("nft",),
    "objective.sigmas_per_sample": ("nft", "awm", "dpo"),
    "objective.dpo_beta": ("dpo",),
    "objective.pairs_per_group": ("dpo",),
    "objective.weighting": ("awm",),
    "objective.sigma_distribution": ("sft",),
    "objective.adv_clip": _ADVANTAGE,
    "objective.kl_coef": _ADVANTAGE,
    "objective.kl_reference": _ADVANTAGE,
    "objective.std_normalization": _ADVANTAGE,
    "objective.global_std": _ADVANTAGE,
    "objective.ddof": _ADVANTAGE,
    "objective.combine": _ADVANTAGE,
    "rewards": _ROLLOUT,
    "monitor": _ROLLOUT,
    "hooks": _ROLLOUT,
    "hooks.steps": ("flow_grpo",),
    "train.grad_spike_factor": _ROLLOUT,
    "data": ("sft",),
    "ema": ("sft", *_ADVANTAGE),
}
_NEEDS: Mapping[ObjectiveName, str] = dict.fromkeys(_ROLLOUT, "rewards") | {"sft": "data"}


class ObjectiveSection(Section):
    """`[objective]`: advantages and loss."""

    name: ObjectiveName = "flow_grpo"
    """Registered objective: sft learns from the pictures of `[data]`, all others from rewards of rollouts."""
    adv_clip: PositiveFloat = 5.0
    """Advantages are clamped to [-adv_clip, adv_clip]."""
    kl_coef: NotNegativeFloat = 0.0
    """Weight of the KL to the reference policy."""
    kl_reference: Literal["initial", "ema"] = "initial"
    """Reference of the KL: the initial policy (adapter off, or a frozen copy), or the moving average of `[ema]`."""
    clip_range: PositiveFloat = 1e-4
    """flow_grpo, awm: half-width c of the ratio's clip range [1 - c, 1 + c]."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """flow_grpo, over latent dimensions: the field's mean, whose ratio is the 1/D power of the true one, or the sum."""
    recompute_old_log_prob: bool = False
    """flow_grpo: take old log-probs from the trainer before the first update instead of from the engine."""
    max_log_prob_drift: PositiveFloat | None = None
    """flow_grpo: largest |log p of trainer - log p of engine| a run may begin with; absent: half of clip_range."""
    guard: bool = False
    """flow_grpo: GRPO-Guard: centre the ratio at 1 at every step, and give all steps the same weight."""
    dppo_threshold: PositiveFloat | None = None
    """flow_grpo: Flow-DPPO: drop a pair whose step has left the old policy by this divergence, instead of the clip."""
    beta: PositiveFloat = 1.0
    """nft: how far the implicit positive and negative policies lie from the old one, in units of new - old."""
    old_decay: Literal["zero", "ramp", "late_ramp"] = "ramp"
    """nft: decay of the old policy after n updates: 0, min(0.001 n, 0.5), or min(0.0075 (n - 75), 0.999) for n > 75."""
    sigmas_per_sample: Positive | None = None
    """nft, awm, dpo: levels of the grid at which a sample, or pair, is trained; absent: floor(0.99 steps), or 1."""
    dpo_beta: PositiveFloat = 2000.0
    """dpo: how strongly the loss is tied to the initial policy; high values keep the policy near it."""
    pairs_per_group: Positive = 1
    """dpo: pairs made of a group: best and worst, then second best and second worst, and so on."""
    weighting: Literal["uniform", "linear", "quadratic", "ghuber"] = "uniform"
    """awm: weight of the matching loss by noise level: 1, sigma, sigma^2, or sigma with a fourth root of the loss."""
    std_normalization: bool = True
    """Divide advantages by the standard deviation."""
    global_std: bool = False
    """Use the whole batch's standard deviation instead of the group's."""
    ddof: Literal[0, 1] = 0
    """0: population, 1: sample standard deviation."""
    combine: Literal["weighted_sum", "gdpo"] = "weighted_sum"
    """How several rewards become one advantage."""
    sigma_distribution: Literal["uniform", "logit_normal"] = "uniform"
    """sft: how noise levels are drawn, before the shift."""

    @property
    def stochastic(self) -> bool:
        """Whether rollout takes stochastic steps; otherwise it follows the ODE and stores the final latents alone."""
        return self.name in _READ_BY["sampling.transition"]

    @property
    def keeps_old_policy(self) -> bool:
        """Whether rollout samples from an old policy that follows the trained one."""
        return self.name in _READ_BY["objective.old_decay"]

    @property
    def compares_means(self) -> bool:
        """Whether the loss needs the old policy's mean of each step, which only the trainer can compute."""
        return self.guard or self.dppo_threshold is not None

    @property
    def needs_initial_policy(self) -> bool:
        """Whether the loss compares with the policy that the run began with."""
        return self.name == "dpo" or (self.kl_coef > 0 and self.kl_reference == "initial")


def check_keys(recipe: BaseModel, objective: ObjectiveName) -> None:
    """Raise `InvalidArgument` for a key that says something which the objective never reads, or one that it lacks."""
    for key, readers in _READ_BY.items():
        if objective not in readers and _says_something(recipe, key):
            raise _invalid(
                key, f"objective {objective!r} has no use for {key}; leave it out (read by {', '.join(readers)})"
            )
    if not getattr(recipe, _NEEDS[objective]):
        raise _invalid(_NEEDS[objective], f"{_NEEDS[objective]} is missing; objective {objective!r} needs at least 1")


def _says_something(recipe: BaseModel, key: str) -> bool:
    """Whether the value of `key` differs from its default."""
    *parents, last = key.split(".")
    section = recipe
    for name in parents:
        section = getattr(section, name)
    return bool(getattr(section, last) != type(section).model_fields[last].get_default(call_default_factory=True))


def _invalid(key: str, message: str) -> InvalidArgument:
    return InvalidArgument(message, field=key, reason="RECIPE_INVALID")
