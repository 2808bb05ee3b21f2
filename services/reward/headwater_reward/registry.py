"""What a reward is, which ones there are, and how their parameters are checked.

A reward is one class. Built-in ones are listed below; packages add theirs with an entry point of group
`headwater.rewards` whose value names the class (see services/reward/README.md).
"""

import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from headwater.errors import FailedPrecondition, HeadwaterError, InvalidArgument, NotFound

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "headwater.rewards"
BUILT_IN: Mapping[str, str] = {
    "aesthetic": "headwater_reward.rewards.clip_rewards:AestheticReward",
    "clipscore": "headwater_reward.rewards.clip_rewards:ClipScoreReward",
    "color_shape": "headwater_reward.rewards.color_shape:ColorShapeReward",
    "hpsv2": "headwater_reward.rewards.clip_rewards:HpsV2Reward",
    "jpeg_compressibility": "headwater_reward.rewards.jpeg:JpegCompressibilityReward",
    "jpeg_incompressibility": "headwater_reward.rewards.jpeg:JpegIncompressibilityReward",
    "ocr": "headwater_reward.rewards.ocr:OcrReward",
    "pickscore": "headwater_reward.rewards.clip_rewards:PickScoreReward",
    "tiny-geneval": "headwater_reward.rewards.tiny_geneval:TinyGenevalReward",
}
LEARNED_MODULES = frozenset({"torch", "transformers", "safetensors"})
"""What the extra `reward-models` brings; every other module comes with the extra `reward`."""


class RewardParams(BaseModel):
    """Parameters of a reward: subclass it; every field needs a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class ScoreItem:
    """One medium to be scored."""

    frames_FHWC: np.ndarray  # uint8 [F, H, W, 3], RGB; F = 1 for an image
    prompt: str
    metadata: Mapping[str, Any]
    params: RewardParams


@dataclass(frozen=True)
class Score:
    """A finite score in the reward's own scale, and the parts that explain it."""

    value: float
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GoldenImage:
    """An image drawn by the reward itself whose score is known: the self-test before a run may start."""

    name: str
    image_HWC: np.ndarray  # uint8 [H, W, 3], RGB
    prompt: str
    recorded_score: float
    tolerance: float = 0.01
    params: Mapping[str, Any] = field(default_factory=dict)


class Reward(Protocol):
    """What a reward class offers. One thread calls `load` and then `score`, so an instance needs no locks."""

    name: ClassVar[str]
    description: ClassVar[str]  # what it measures, one sentence
    minimum: ClassVar[float | None]
    maximum: ClassVar[float | None]
    accepts_video: ClassVar[bool]
    requires: ClassVar[tuple[str, ...]]  # importable modules that it needs
    params_model: ClassVar[type[RewardParams]]

    def load(self, threads: int) -> None:
        """Load models, on at most `threads` CPU threads. Called once; an exception stops the server's start."""
        ...

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """One outcome per item, in order. What cannot be scored is an error, never 0."""
        ...

    def golden_images(self) -> list[GoldenImage]:
        """At least one image with a high and one with a low recorded score."""
        ...


def known() -> dict[str, EntryPoint]:
    """Every reward that is declared, by name, whether or not its packages are installed."""
    found = {name: EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in BUILT_IN.items()}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in found and found[point.name].value != point.value:
            raise FailedPrecondition(
                f"reward {point.name!r} is declared twice: {found[point.name].value} and {point.value}; rename one",
                reason="REWARD_DECLARED_TWICE",
            )
        found[point.name] = point
    return dict(sorted(found.items()))


def create(names: Sequence[str], settings: Mapping[str, Mapping[str, str]] | None = None) -> list[Reward]:
    """The named rewards, not yet loaded, sorted by name. No names: all that need no settings and have their packages.

    A class with a `settings_model` is made with it, filled from `settings[name]`: models, devices, addresses of this
    server. Raises `NotFound` for an unknown name, `InvalidArgument` for a wrong setting, `FailedPrecondition` when a
    package is missing or nothing can be hosted.
    """
    declared, settings = known(), settings or {}
    for name in [*names, *settings]:
        if name not in declared:
            raise NotFound(f"no reward is named {name!r}; {suggestion(name, declared)}", reason="REWARD_UNKNOWN")
    rewards: list[Reward] = []
    for name in sorted(set(names) or declared):
        reward_class = declared[name].load()
        if not names and name not in settings and hasattr(reward_class, "settings_model"):
            continue
        remedy = _missing(reward_class)
        if not remedy:
            rewards.append(_make(name, reward_class, settings.get(name, {})))
        elif names:
            raise FailedPrecondition(f"reward {name!r} {remedy}", reason="REWARD_NOT_INSTALLED")
        else:
            log.warning("reward left out: %r %s", name, remedy)
    if not rewards:
        raise FailedPrecondition(
            "no reward can be hosted: none has its packages installed; run pip install 'headwater[reward]'",
            reason="REWARD_NOT_INSTALLED",
        )
    return rewards


def _missing(reward_class: type[Reward]) -> str:
    """What is not installed and what brings it; empty when all is."""
    missing = [module for module in reward_class.requires if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    extra = "reward-models" if LEARNED_MODULES & set(missing) else "reward"
    return (
        f"needs {', '.join(missing)}, which is not installed; install the extra that brings it, e.g. "
        f"pip install 'headwater[{extra}]'"
    )


def _make(name: str, reward_class: Any, settings: Mapping[str, str]) -> Reward:
    if hasattr(reward_class, "settings_model"):
        reward: Reward = reward_class(parse_params(reward_class.settings_model, settings, field=f"--set {name}"))
        return reward
    if settings:
        key = next(iter(settings))
        raise InvalidArgument(f"--set {name}.{key}: reward {name!r} has no settings", field=f"--set {name}.{key}")
    reward = reward_class()
    return reward


def parse_params(model: type[RewardParams], values: Mapping[str, Any], *, field: str) -> RewardParams:
    """Check parameters. Raises `InvalidArgument` naming the path below `field` and, for a typo, the nearest name."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            what = f"is unknown; {suggestion(key, model.model_fields)}"
        elif first["type"] == "missing":
            what = f"is missing; it is {model.model_fields[key].description}"
        else:
            what = f"is {first['input']!r}: {first['msg']}"
        path = f"{field}.{key}" if key else field
        raise InvalidArgument(f"{path} {what}", field=path, reason="REWARD_PARAM_INVALID") from None


def suggestion(name: str, valid: Mapping[str, Any]) -> str:
    """A sentence that names the nearest valid name, if one is near, and all of them."""
    near = get_close_matches(name, list(valid), n=1)
    everything = ", ".join(sorted(valid)) or "none"
    return f"did you mean {near[0]!r}? Known: {everything}" if near else f"known: {everything}"
