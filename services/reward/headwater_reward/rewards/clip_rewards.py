"""`pickscore`, `clipscore`, `hpsv2` and `aesthetic`: rewards on CLIP features. cos is of image and prompt features.

- pickscore = exp(logit_scale) · cos / 26 (PickScore, arXiv 2305.01569; Flow-GRPO divides by 26; detail `raw` does not).
- clipscore = 2.5 · max(cos, 0) with the prompt after "A photo depicts " (CLIPScore, arXiv 2104.08718).
- hpsv2 = cos (HPSv2, arXiv 2306.09341).
- aesthetic = linear layers on the image features (LAION improved aesthetic predictor); the prompt is not used.

A video scores the mean over `frames` frames, evenly spaced from the first to the last.
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from headwater.errors import FailedPrecondition, HeadwaterError
from headwater_reward.registry import GoldenImage, RewardParams, Score, ScoreItem
from headwater_reward.rewards.clip_model import REQUIRES, ClipModel, ClipSettings, read_golden, read_tensors

PICKSCORE_NORM = 26.0
CLIPSCORE_WEIGHT = 2.5


class ClipParams(RewardParams):
    """Parameters of every reward here."""

    frames: int = Field(8, ge=1, le=256)  # of a video; an image has one


class ClipScoreParams(ClipParams):
    """Parameters of `clipscore`."""

    prefix: str = Field("A photo depicts ", max_length=256)


class _ClipReward(ABC):
    """Loading, frames and golden images; a subclass turns features into scores."""

    name: ClassVar[str]
    description: ClassVar[str]
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None
    accepts_video: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = REQUIRES
    params_model: ClassVar[type[RewardParams]] = ClipParams
    settings_model: ClassVar[type[ClipSettings]] = ClipSettings

    def __init__(self, settings: ClipSettings) -> None:
        self._settings = settings
        self._golden: list[GoldenImage] = []

    def load(self, threads: int) -> None:
        """Load the model and the golden images. Raises `FailedPrecondition`."""
        self._clip = ClipModel(self._settings, threads=threads)
        self._golden = self._load_golden()

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """All frames of the batch in one pass through the model; a video scores the mean of its frames."""
        frames, owner = [], []
        for i, item in enumerate(batch):
            assert isinstance(item.params, ClipParams)
            count = len(item.frames_FHWC)
            for f in np.linspace(0, count - 1, min(count, item.params.frames)).round().astype(int):
                frames.append(item.frames_FHWC[f])
                owner.append(i)
        values = self._frame_scores(self._clip.image_features(frames), [batch[i] for i in owner])
        owners = np.array(owner)
        return [self._finish(float(values[owners == i].mean())) for i in range(len(batch))]

    def golden_images(self) -> list[GoldenImage]:
        """Those of the setting `golden`, else two whose scores were recorded at load."""
        return self._golden

    @abstractmethod
    def _frame_scores(self, features_ND: np.ndarray, items: Sequence[ScoreItem]) -> np.ndarray:
        """Scores [N] of frames, given their features and items."""

    def _finish(self, value: float) -> Score:
        return Score(value)

    def _cosines(self, features_ND: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
        return (features_ND * self._clip.text_features(prompts)).sum(axis=1)

    def _load_golden(self) -> list[GoldenImage]:
        if self._settings.golden:
            entries = read_golden(self._settings.golden)
            return [GoldenImage(e["image"], e["pixels"], e["prompt"], e["score"], e["tolerance"]) for e in entries]
        half = np.full((64, 64, 3), 255, np.uint8)
        half[:, 32:] = (255, 0, 0)
        noise = np.random.default_rng(0).integers(0, 256, half.shape, np.uint8)
        images, prompt, params = {"half red": half, "noise": noise}, "a red rectangle", self.params_model()
        recorded = {}
        for name, image in images.items():
            outcome = self.score([ScoreItem(image[None], prompt, {}, params)])[0]
            assert isinstance(outcome, Score)
            recorded[name] = outcome.value
        return [GoldenImage(name, image, prompt, recorded[name]) for name, image in images.items()]


class PickScoreReward(_ClipReward):
    """Human preference learned from Pick-a-Pic."""

    name = "pickscore"
    description = "PickScore: human preference for the prompt, divided by 26."

    def _frame_scores(self, features_ND: np.ndarray, items: Sequence[ScoreItem]) -> np.ndarray:
        return self._clip.logit_scale * self._cosines(features_ND, [item.prompt for item in items]) / PICKSCORE_NORM

    def _finish(self, value: float) -> Score:
        return Score(value, {"raw": value * PICKSCORE_NORM})


class ClipScoreReward(_ClipReward):
    """Agreement of image and prompt."""

    name = "clipscore"
    description = "CLIPScore: 2.5 times the cosine of image and prompt, at least 0."
    minimum, maximum = 0.0, CLIPSCORE_WEIGHT
    params_model = ClipScoreParams

    def _frame_scores(self, features_ND: np.ndarray, items: Sequence[ScoreItem]) -> np.ndarray:
        prompts = []
        for item in items:
            assert isinstance(item.params, ClipScoreParams)
            prompts.append(item.params.prefix + item.prompt)
        return CLIPSCORE_WEIGHT * np.maximum(self._cosines(features_ND, prompts), 0.0)


class HpsV2Reward(_ClipReward):
    """Human preference learned from HPD v2."""

    name = "hpsv2"
    description = "HPSv2: the cosine of image and prompt in a CLIP model tuned on human preferences."
    minimum, maximum = -1.0, 1.0

    def _frame_scores(self, features_ND: np.ndarray, items: Sequence[ScoreItem]) -> np.ndarray:
        return self._cosines(features_ND, [item.prompt for item in items])


class AestheticSettings(ClipSettings):
    """A CLIP model and its head."""

    head: str = Field(description="a safetensors file of linear layers, applied in the order of their numbers")


class AestheticReward(_ClipReward):
    """Beauty as people rate it, whatever the prompt."""

    name = "aesthetic"
    description = "LAION aesthetic predictor: linear layers on CLIP image features, about 1 to 10."
    settings_model = AestheticSettings

    def load(self, threads: int) -> None:
        """Load the head, then the model. Raises `FailedPrecondition`."""
        assert isinstance(self._settings, AestheticSettings)
        self._layers = head_layers(read_tensors(self._settings.head), self._settings.head)
        super().load(threads)

    def _frame_scores(self, features_ND: np.ndarray, items: Sequence[ScoreItem]) -> np.ndarray:
        values = features_ND
        for weight, bias in self._layers:
            if values.shape[1] != weight.shape[1]:
                raise FailedPrecondition(
                    f"the head takes {weight.shape[1]} features, but the CLIP model gives {values.shape[1]}; "
                    "use the CLIP model that the head was trained on",
                    reason="REWARD_MODEL_UNUSABLE",
                )
            values = values @ weight.T + bias
        return values[:, 0]


def head_layers(tensors: dict[str, np.ndarray], file: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(weight [out, in], bias [out]) of each linear layer; the published head has no activations between them.

    Names are `weight` and `bias`, with any prefix, e.g. `layers.0.weight`. Raises `FailedPrecondition`.
    """
    prefixes = sorted(
        {name.rpartition(".")[0] for name in tensors}, key=lambda prefix: [int(n) for n in re.findall(r"\d+", prefix)]
    )
    try:
        dots = [prefix + "." if prefix else "" for prefix in prefixes]
        layers = [(tensors[dot + "weight"], tensors[dot + "bias"]) for dot in dots]
        chained = all(a[0].shape[0] == b[0].shape[1] for a, b in itertools.pairwise(layers))
        fits = all(weight.ndim == 2 and bias.shape == weight.shape[:1] for weight, bias in layers)
        if len(tensors) != 2 * len(layers) or not layers or not fits or not chained or layers[-1][0].shape[0] != 1:
            raise ValueError(f"its shapes are {[w.shape for w, _ in layers]}")
    except (KeyError, ValueError, IndexError) as error:
        raise FailedPrecondition(
            f"{file!r} holds no chain of linear layers that ends in one number: {error}; it must hold pairs of "
            "weight [out, in] and bias [out], e.g. layers.0.weight and layers.0.bias",
            reason="REWARD_MODEL_UNUSABLE",
        ) from error
    return layers
