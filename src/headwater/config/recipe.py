"""The recipe of a training run: one pydantic model per TOML section. Unknown keys are errors (see `load`)."""

from typing import Annotated, Any, Literal, Self

from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from pydantic import Field, model_validator

from headwater import sampling as sampling_rules
from headwater.common.v1.reward_pb2 import RewardFailurePolicy, RewardRole, RewardSpec
from headwater.common.v1.sampling_pb2 import SamplingParams, StepList, StepWindow, TransitionKind, TransitionParams
from headwater.config.objective import ObjectiveSection, check_keys
from headwater.config.section import NotNegative, NotNegativeFloat, Positive, PositiveFloat, Section
from headwater.config.steps import StepStrategy, random_steps, sliding_window
from headwater.config.supervised import DataSection, EmaSection, ExportSection, PicturesSection
from headwater.errors import InvalidArgument

_TRANSITIONS = {
    "sde": TransitionKind.TRANSITION_KIND_SDE,
    "cps": TransitionKind.TRANSITION_KIND_CPS,
    "dance": TransitionKind.TRANSITION_KIND_DANCE,
}
_ROLES = {"train": RewardRole.REWARD_ROLE_TRAIN, "monitor": RewardRole.REWARD_ROLE_MONITOR}
_POLICIES: dict[str | None, RewardFailurePolicy.ValueType] = {
    None: RewardFailurePolicy.REWARD_FAILURE_POLICY_UNSPECIFIED,
    "retry": RewardFailurePolicy.REWARD_FAILURE_POLICY_RETRY,
    "drop_group": RewardFailurePolicy.REWARD_FAILURE_POLICY_DROP_GROUP,
    "fail_run": RewardFailurePolicy.REWARD_FAILURE_POLICY_FAIL_RUN,
    "drop_reward": RewardFailurePolicy.REWARD_FAILURE_POLICY_DROP_REWARD,
}
# Keys of each step strategy; it needs the first.
_STRATEGY_KEYS: dict[StepStrategy, tuple[str, ...]] = {
    "all": (),
    "sde_window": ("window_size", "window_begin", "window_end"),
    "sliding": ("window_size", "window_begin", "window_end", "window_stride", "window_every"),
    "random_steps": ("random_count", "random_candidates"),
}
# Fields that headwater.sampling names, as the recipe calls them.
_SAMPLING_KEYS = {
    "sampling.transition.window": "sampling.window_size",
    "sampling.transition.noise_level": "sampling.noise_level",
    "sampling.transition": "sampling.window_end",
    "sampling.transition.explicit_steps.steps": "sampling.step_strategy",
}


class RunSection(Section):
    """`[run]`: identity and reproducibility."""

    seed: NotNegative = 0
    """Seed of prompt order, sample seeds and adapter initialisation."""
    output_dir: str | None = None
    """Folder of checkpoints and metrics; absent: the trainer's own folder."""
    deterministic: bool = False
    """Use deterministic kernels and train groups in submission order, so that a run repeats bit for bit."""


class ModelSection(Section):
    """`[model]`: what is trained."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of a pipeline in the diffusers layout, or a hub id."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute type of the denoiser in the trainer; master weights are always fp32."""


class SamplingSection(Section):
    """`[sampling]`: how rollout turns a prompt into images."""

    steps: Positive = 10
    """Denoise steps."""
    height_px: Positive = 512
    """Image height in pixels."""
    width_px: Positive = 512
    """Image width in pixels."""
    guidance_scale: float = 1.0
    """Classifier-free guidance scale; 1 means none. nft guides rollout only: its loss sees the conditional branch."""
    negative_prompt: str = ""
    """Prompt of the unconditional branch; used with guidance only."""
    transition: Literal["sde", "cps", "dance", "ode"] = "sde"
    """flow_grpo: rule of the stochastic steps: Flow-GRPO's SDE, Flow-CPS or DanceGRPO's SDE."""
    noise_level: float = sampling_rules.DEFAULT_NOISE_LEVEL
    """flow_grpo: noise level (eta) of the stochastic steps."""
    step_strategy: StepStrategy | None = None
    """flow_grpo: which steps are stochastic; absent: sde_window when window_size is given, else all (but the last)."""
    random_candidates: list[NotNegative] | None = None
    """random_steps: steps to draw from, 0-based; absent: all but the last."""
    random_count: Positive | None = None
    """random_steps: how many of them are drawn for each round of groups."""
    window_stride: Positive = 1
    """sliding: how far the window moves; after its last position comes the first."""
    window_every: Positive = 25
    """sliding: rounds of groups (training steps, when no group is dropped) between moves."""
    window_size: Positive | None = None
    """sde_window, sliding: consecutive stochastic steps; sde_window draws its place once per group."""
    window_begin: NotNegative = 0
    """sde_window, sliding: first step that the window may contain, 0-based."""
    window_end: NotNegative | None = None
    """sde_window, sliding: one past the last step that it may contain; absent: steps - 1, without the last step."""
    flow_shift: float | None = None
    """Shift of the sigma grid; absent: the model's own."""

    @property
    def strategy(self) -> StepStrategy:
        """The step strategy, with its default."""
        return self.step_strategy or ("all" if self.window_size is None else "sde_window")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.window_size is None and (self.window_begin or self.window_end is not None):
            key = "sampling.window_begin" if self.window_begin else "sampling.window_end"
            raise InvalidArgument(f"{key} needs sampling.window_size as well", field=key, reason="RECIPE_INVALID")
        own = _STRATEGY_KEYS[self.strategy]
        for key in sorted({key for keys in _STRATEGY_KEYS.values() for key in keys} - set(own)):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise _invalid_sampling(key, f"is set, and sampling.step_strategy {self.strategy!r} has no use for it")
        if own and getattr(self, own[0]) is None:
            raise _invalid_sampling(own[0], f"is missing; sampling.step_strategy {self.strategy!r} needs it")
        if self.strategy == "random_steps":
            self._check_candidates()
        return self

    def _check_candidates(self) -> None:
        candidates, count = self._candidates(), self.random_count or 0
        if sorted(set(candidates)) != candidates or candidates[-1:] >= [self.steps]:
            raise _invalid_sampling(
                "random_candidates",
                f"is {candidates}; it must be strictly increasing, below sampling.steps = {self.steps}",
            )
        if count > len(candidates):
            raise _invalid_sampling("random_count", f"is {count}; there are {len(candidates)} steps to draw from")

    def _candidates(self) -> list[int]:
        return list(range(self.steps - 1)) if self.random_candidates is None else self.random_candidates

    def to_proto(self, round_number: int = 0, seed: int = 0) -> SamplingParams:
        """The parameters of rollouts with stochastic steps, in a round of a run with this seed."""
        params = self.to_ode_proto()
        transition = TransitionParams(kind=_TRANSITIONS[self.transition], noise_level=self.noise_level)
        window = StepWindow(size=self.window_size or 0, range_begin=self.window_begin, range_end=self.window_end)
        if self.strategy == "sde_window":
            transition.window.CopyFrom(window)
        elif self.strategy == "sliding":
            end = self.steps - 1 if self.window_end is None else self.window_end
            if self.window_begin + window.size <= end <= self.steps:
                steps = sliding_window(
                    self.window_begin, end, window.size, stride=self.window_stride, every=self.window_every,
                    round_number=round_number,
                )  # fmt: skip
                transition.explicit_steps.CopyFrom(StepList(steps=steps))
            else:
                transition.window.CopyFrom(window)  # does not fit; headwater.sampling says so
        elif self.strategy == "random_steps":
            steps = random_steps(self._candidates(), self.random_count or 1, round_number=round_number, seed=seed)
            transition.explicit_steps.CopyFrom(StepList(steps=steps))
        params.transition.CopyFrom(transition)
        return params

    def to_ode_proto(self) -> SamplingParams:
        """The same without noise after the first latent."""
        return SamplingParams(
            steps=self.steps,
            height_px=self.height_px,
            width_px=self.width_px,
            guidance_scale=self.guidance_scale,
            negative_prompt=self.negative_prompt,
            flow_shift=self.flow_shift,
        )


class PromptsSection(Section):
    """`[prompts]`: what is drawn. Exactly one of `path` and `texts`; `headwater.config.prompts` reads them."""

    path: str | None = None
    """A .jsonl file (one {"prompt": …, "metadata": {…}} a line) or a .txt file (one prompt a line)."""
    texts: list[Annotated[str, Field(min_length=1)]] | None = None
    """The prompts themselves."""
    shuffle: bool = True
    """Draw in a new order, seeded by run.seed, at each pass."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.texts is None):
            raise InvalidArgument(
                "give exactly one of prompts.path and prompts.texts", field="prompts.path", reason="RECIPE_INVALID"
            )
        if self.texts is not None and not any(self.texts):
            raise InvalidArgument(
                "prompts.texts is empty; name at least one prompt", field="prompts.texts", reason="RECIPE_INVALID"
            )
        return self


class RewardSection(Section):
    """One `[[rewards]]` entry."""

    name: Annotated[str, Field(min_length=1)]
    """Registered name; the running reward server lists what it hosts (`headwater status`)."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Weight in the combined reward."""
    role: Literal["train", "monitor"] = "train"
    """Trained on, or only watched."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reward."""
    failure_policy: Literal["retry", "drop_group", "fail_run", "drop_reward"] | None = None
    """What to do when it cannot be computed; absent: retry (train) or drop_reward (monitor)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.failure_policy == "drop_reward" and self.role != "monitor":
            raise InvalidArgument(
                f"reward {self.name!r} is trained on and cannot use failure_policy 'drop_reward'; "
                "use retry, drop_group or fail_run",
                field="rewards.failure_policy",
                reason="RECIPE_INVALID",
            )
        return self

    def to_proto(self) -> RewardSpec:
        """The reward as the services know it."""
        return RewardSpec(
            name=self.name,
            weight=self.weight,
            role=_ROLES[self.role],
            params=ParseDict(self.params, Struct()),
            failure_policy=_POLICIES[self.failure_policy],
        )


class TrainSection(Section):
    """`[train]`: size and pace of the run."""

    steps: Positive
    """Training steps; each consumes one batch of groups and ends with a weight update."""
    groups_per_step: Positive = 4
    """Groups (prompts) per step, over all ranks."""
    group_size: Positive = 16
    """Samples per group."""
    staleness_bound: NotNegative = 0
    """Largest age, in steps, of the weights that made a trained group; 0 is strictly on-policy."""
    updates_per_batch: Positive = 1
    """Optimizer updates per step; each takes an equal share of the groups."""
    micro_batch_size: Positive = 8
    """Pairs (sft: pictures) per forward and backward pass of a rank."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    grad_spike_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Skip an update whose gradient norm exceeds this many times the median of the last 64; absent: never."""
    checkpoint_every: NotNegative = 0
    """Steps between checkpoints; 0: only at the end of the run."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""
    report_every: Positive = 1
    """sft: steps between reported figures, which are means over them."""
    cuda_graph: bool = False
    """sft on one GPU with one micro-batch a step: record forward and backward as a CUDA graph. For small models."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.groups_per_step % self.updates_per_batch:
            raise InvalidArgument(
                f"train.updates_per_batch is {self.updates_per_batch}; it must divide train.groups_per_step = "
                f"{self.groups_per_step}",
                field="train.updates_per_batch",
                reason="RECIPE_INVALID",
            )
        return self


class MonitorSection(Section):
    """`[monitor]`: what happens when a monitor reward falls while the train reward rises."""

    on_fall: Literal["ignore", "warn", "rollback"] = "warn"
    """rollback ends the run and puts back the newest checkpoint from when the monitor was at its best."""
    window: Annotated[int, Field(ge=2, le=10_000)] = 10
    """Steps whose means are compared with those at which the monitor was highest."""
    deviations: PositiveFloat = 3.0
    """Standard errors by which the monitor must have fallen."""


class HooksSection(Section):
    """`[hooks]`: code of one's own, `module:name` or an entry point, that the trainer was started to allow."""

    objective: Annotated[str, Field(min_length=1)] | None = None
    """Class that stands in for the named objective, whose keys and rollouts it shares."""
    filter: Annotated[str, Field(min_length=1)] | None = None
    """Function of a scored group that says why it is not trained on, or ""."""
    steps: Annotated[str, Field(min_length=1)] | None = None
    """flow_grpo: function of round and seed that gives the stochastic steps, in place of sampling.step_strategy."""


class OptimizerSection(Section):
    """`[optimizer]`: AdamW."""

    lr: PositiveFloat = 3e-4
    """Learning rate; the highest of the schedule."""
    schedule: Literal["constant", "cosine", "one_cycle"] = "constant"
    """constant, cosine (down to 0) or one_cycle (up for three tenths of the run, then down to 0, both by cosine)."""
    warmup_steps: NotNegative = 0
    """Steps over which constant and cosine rise from 0."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.9, 0.999]
    )
    """Decay of the first and second moment."""
    weight_decay: NotNegativeFloat = 0.0
    """Decoupled weight decay."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class LoraSection(Section):
    """`[lora]`: train adapters; without this section all weights of the denoiser are trained."""

    rank: Positive = 32
    """Rank of each adapter."""
    alpha: PositiveFloat = 64.0
    """Adapters are scaled by alpha / rank."""
    targets: list[Annotated[str, Field(min_length=1)]] | None = None
    """Names of the adapted layers; absent: the model family's own list."""


class Recipe(Section):
    """A whole recipe."""

    filters: list[Literal["zero_variance"]] = Field(default=["zero_variance"])
    """Filters that drop groups before they are published."""
    run: RunSection = RunSection()
    """Identity and reproducibility."""
    model: ModelSection
    """What is trained."""
    sampling: SamplingSection = SamplingSection()
    """How rollout samples."""
    prompts: PromptsSection
    """What is drawn; of sft, in pictures only."""
    rewards: list[RewardSection] = Field(default_factory=list)
    """What is measured; not for sft."""
    data: DataSection | None = None
    """Pictures to learn from; for sft only."""
    objective: ObjectiveSection = ObjectiveSection()
    """Advantages and loss."""
    train: TrainSection
    """Size and pace."""
    monitor: MonitorSection = MonitorSection()
    """Reward hacking."""
    hooks: HooksSection = HooksSection()
    """Code of one's own."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW."""
    lora: LoraSection | None = None
    """Adapters; absent: full fine-tune."""
    ema: EmaSection | None = None
    """A moving average of the weights: for sft, and for objective.kl_reference "ema"."""
    pictures: PicturesSection = PicturesSection()
    """Grids of pictures; for sft only."""
    export: ExportSection = ExportSection()
    """Copies of the pipeline; for sft only."""

    @property
    def supervised(self) -> bool:
        """Whether the run learns from given pictures, without rollout."""
        return self.objective.name == "sft"

    def rollout_sampling(self, round_number: int = 0) -> SamplingParams:
        """The parameters of training rollouts in a round: with stochastic steps when the objective learns from them."""
        if self.objective.stochastic:
            return self.sampling.to_proto(round_number, self.run.seed)
        return self.sampling.to_ode_proto()

    @property
    def levels_per_sample(self) -> int:
        """At how many noise levels of the rollout's grid a forward-process objective trains a sample."""
        return self.objective.sigmas_per_sample or max(1, 99 * self.sampling.steps // 100)

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        check_keys(self, self.objective.name)
        if self.objective.stochastic and self.sampling.transition == "ode":
            raise _invalid_sampling(
                "transition",
                f"is 'ode', whose steps have no log-probability for objective {self.objective.name!r} to learn from; "
                "use 'sde', 'cps' or 'dance', or objective.name = 'nft', 'awm' or 'dpo'",
            )
        if self.sampling.transition == "cps" and self.sampling.steps - 1 in (self.sampling.random_candidates or ()):
            raise _invalid_sampling("random_candidates", "holds the last step, where CPS has a std of 0; leave it out")
        wanted = self.objective.sigmas_per_sample
        if wanted is not None and wanted > self.sampling.steps:
            raise InvalidArgument(
                f"objective.sigmas_per_sample is {wanted}; the grid has sampling.steps = {self.sampling.steps} noise "
                "levels to draw from",
                field="objective.sigmas_per_sample",
                reason="RECIPE_INVALID",
            )
        _check_reference(self.objective, self.ema)
        _check_means(self.objective, self.sampling)
        try:
            sampling_rules.resolve(self.rollout_sampling(), group_seed=0)
        except InvalidArgument as e:
            key = _SAMPLING_KEYS.get(e.field, e.field)
            raise InvalidArgument(e.message.replace(e.field, key, 1), field=key, reason="RECIPE_INVALID") from e
        return self

    def _check_rollback(self) -> None:
        lacks = "" if self.train.checkpoint_every else "train.checkpoint_every is 0, so there is nothing to go back to"
        if all(reward.role != "monitor" for reward in self.rewards):
            lacks = "no reward has role 'monitor', so nothing can fall"
        if lacks:
            raise InvalidArgument(
                f"monitor.on_fall is 'rollback' and {lacks}",
                field="monitor.on_fall",
                reason="RECIPE_INVALID",
            )

    def _check_preferences(self) -> None:
        most = self.train.group_size // 2
        if self.objective.pairs_per_group > most:
            raise InvalidArgument(
                f"objective.pairs_per_group is {self.objective.pairs_per_group}; a group of train.group_size = "
                f"{self.train.group_size} samples has at most {most} pairs",
                field="objective.pairs_per_group",
                reason="RECIPE_INVALID",
            )
        if "zero_variance" not in self.filters:
            raise InvalidArgument(
                "filters lack 'zero_variance'; objective 'dpo' can make no pair of samples that score alike",
                field="filters",
                reason="RECIPE_INVALID",
            )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.supervised:
            return self
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise InvalidArgument(
                f"rewards are named {names}; each may appear once", field="rewards", reason="RECIPE_INVALID"
            )
        if all(reward.role != "train" for reward in self.rewards):
            raise InvalidArgument(
                "no reward has role 'train', so there is nothing to learn from; give one of them that role",
                field="rewards",
                reason="RECIPE_INVALID",
            )
        if self.monitor.on_fall == "rollback":
            self._check_rollback()
        if self.objective.name == "dpo":
            self._check_preferences()
        if self.train.group_size == 1 and ("zero_variance" in self.filters or self.objective.ddof == 1):
            raise InvalidArgument(
                "train.group_size is 1, whose rewards have no variance: every group would be dropped; use at least 2",
                field="train.group_size",
                reason="RECIPE_INVALID",
            )
        return self


def _invalid_sampling(key: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"sampling.{key} {what}", field=f"sampling.{key}", reason="RECIPE_INVALID")


def _check_means(objective: ObjectiveSection, sampling: SamplingSection) -> None:
    """What GRPO-Guard and Flow-DPPO need."""
    key = "objective.guard" if objective.guard else "objective.dppo_threshold"
    why = ""
    if objective.compares_means and not objective.recompute_old_log_prob:
        why = "the old policy's means, which the engine does not record; set objective.recompute_old_log_prob = true"
    elif objective.guard and objective.log_prob_reduction == "sum":
        why = "the mean log-probability; set objective.log_prob_reduction = 'mean'"
    elif objective.guard and sampling.transition == "cps":
        why = "a log-probability with its constants, which cps drops; set sampling.transition to 'sde' or 'dance'"
    if why:
        raise InvalidArgument(f"{key} needs {why}", field=key, reason="RECIPE_INVALID")


def _check_reference(objective: ObjectiveSection, ema: EmaSection | None) -> None:
    """A KL needs its reference, and a moving average somebody who reads it."""
    if objective.name == "sft":
        return
    if objective.kl_reference == "ema" and ema is None:
        raise InvalidArgument(
            "objective.kl_reference is 'ema' and there is no moving average; add [ema] to the recipe",
            field="objective.kl_reference",
            reason="RECIPE_INVALID",
        )
    if objective.kl_reference == "ema" and objective.kl_coef == 0:
        raise InvalidArgument(
            "objective.kl_reference is 'ema' and objective.kl_coef is 0, so no KL is taken; set objective.kl_coef",
            field="objective.kl_coef",
            reason="RECIPE_INVALID",
        )
    if ema is not None and objective.kl_reference != "ema":
        raise InvalidArgument(
            f"objective {objective.name!r} has no use for ema; leave it out, or set objective.kl_reference = 'ema'",
            field="ema",
            reason="RECIPE_INVALID",
        )
