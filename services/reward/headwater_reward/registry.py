"""What a reward is, which ones there are, and how their parameters are checked.

A reward is one class. Built-in ones are listed below; packages add theirs with an entry point of group
`headwater.rewards` whose value names the class (see services/reward/README.md).
"""

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from headwater.errors import FailedPrecondition, HeadwaterError, InvalidArgument, NotFound
from headwater_reward.settings import RewardSettings
from headwater_reward.validation import suggestion, validated

ENTRY_POINT_GROUP = "headwater.rewards"
BUILT_IN: Mapping[str, str] = {
    "aesthetic": "headwater_reward.rewards.aesthetic:AestheticReward",
    "clipscore": "headwater_reward.rewards.preference:ClipScoreReward",
    "color_shape": "headwater_reward.rewards.color_shape:ColorShapeReward",
    "hpsv2": "headwater_reward.rewards.preference:Hpsv2Reward",
    "jpeg_compressibility": "headwater_reward.rewards.jpeg:JpegCompressibilityReward",
    "jpeg_incompressibility": "headwater_reward.rewards.jpeg:JpegIncompressibilityReward",
    "ocr": "headwater_reward.rewards.ocr:OcrReward",
    "pickscore": "headwater_reward.rewards.preference:PickScoreReward",
    "vlm_judge": "headwater_reward.rewards.vlm_judge:VlmJudgeReward",
    "remote": "headwater_reward.rewards.remote:RemoteReward",
    "tiny-geneval": "headwater_reward.rewards.tiny_geneval:TinyGenevalReward",
}


class RewardParams(BaseModel):
    """Parameters of a reward: subclass it; every field needs a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RewardOptions(BaseModel):
    """What a server's owner chooses for a reward, in the file of `--reward-config`: subclass it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class ScoreItem:
    """One medium to be scored."""

    frames_FHWC: np.ndarray  # uint8 [F, H, W, 3], RGB; F = 1 for an image
    prompt: str
    metadata: Mapping[str, Any]
    params: RewardParams
    deadline: float = math.inf  # on the clock of time.monotonic(): when the first caller of the batch gives up


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
    recorded_score: float | None  # None: any finite score, for a reward whose weights its owner chooses
    tolerance: float = 0.01
    params: Mapping[str, Any] = field(default_factory=dict)
    above: str = ""  # name of a golden image that must score lower than this one


class Reward(Protocol):
    """What a reward class offers. One thread calls `load` and then `score`, so an instance needs no locks.

    It may also have, as class variables: `options_model`, a `RewardOptions`; it is then made with `cls(name, options)`,
    else with `cls()`. `group_wise = True`: each batch is one group, whose samples are scored together.
    `by_default = False`: hosted only when asked for by name. `extra`: the extra of its packages.
    `check(timeout_s)`, a method, stands in for golden images and gives the `RewardCheck`.
    """

    @property
    def name(self) -> str:
        """How requests call it."""
        ...

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


def create(names: Sequence[str], settings: Mapping[str, RewardSettings] | None = None) -> list[Reward]:
    """The named rewards, not yet loaded, sorted by name. No names: those of `settings`, else all that are installed.

    Raises `NotFound` for an unknown name, `InvalidArgument` for a wrong option, `FailedPrecondition` when a package or
    a needed option is missing or nothing can be hosted.
    """
    declared, tables = known(), settings or {}
    asked = sorted(set(names) or tables)
    for name in asked:
        kind = tables[name].kind if name in tables else name
        if kind not in declared:
            raise NotFound(f"no reward is named {kind!r}; {suggestion(kind, declared)}", reason="REWARD_UNKNOWN")
    rewards: list[Reward] = []
    for name in asked or declared:
        chosen = tables.get(name, RewardSettings(name))
        kind, missing = _import(declared[chosen.kind])
        if not asked and not getattr(kind, "by_default", True):
            continue
        if not missing:
            rewards.append(_make(kind, name, chosen))
        elif asked:
            raise FailedPrecondition(
                f"reward {name!r} needs {', '.join(missing)}, which is not installed; install the extra that brings "
                f"it: pip install 'headwater[{getattr(kind, 'extra', 'reward')}]'",
                reason="REWARD_NOT_INSTALLED",
            )
    if not rewards:
        raise FailedPrecondition(
            "no reward can be hosted: none has its packages installed; run pip install 'headwater[reward]'",
            reason="REWARD_NOT_INSTALLED",
        )
    return rewards


def _import(point: EntryPoint) -> tuple[Any, list[str]]:
    """The class, None when its own module needs what is not installed, and the modules that are missing."""
    try:
        kind = point.load()
    except ModuleNotFoundError as error:
        return None, [error.name or str(error)]
    return kind, [module for module in kind.requires if importlib.util.find_spec(module) is None]


def _make(kind: Any, name: str, chosen: RewardSettings) -> Reward:
    if hasattr(kind, "options_model"):
        options = validated(kind.options_model, chosen.options, field=name, reason="REWARD_CONFIG_INVALID")
        return kind(name, options)
    if chosen.options or name != kind.name:
        raise InvalidArgument(
            f"reward {chosen.kind!r} takes no options and no other name, but [{name}] gives it some; remove them",
            field=name,
            reason="REWARD_CONFIG_INVALID",
        )
    return kind()


def parse_params(model: type[RewardParams], values: Mapping[str, Any], *, field: str) -> RewardParams:
    """Check parameters. Raises `InvalidArgument` naming the path below `field` and, for a typo, the nearest name."""
    return validated(model, values, field=field, reason="REWARD_PARAM_INVALID")
