"""`pickscore`, `clipscore` and `hpsv2`: what a CLIP model says about an image and its prompt. cos is the cosine of the
two embeddings.

- pickscore = exp(logit_scale) cos / 26: PickScore (arXiv 2305.01569) in the scale of Flow-GRPO (arXiv 2505.05470).
- clipscore = 2.5 max(cos, 0): CLIPScore (arXiv 2104.08718). Its authors put "A photo depicts " before captions: see
  `prefix`.
- hpsv2 = cos: HPSv2 (arXiv 2306.09341).

A video's score is that of its frames, see `headwater_reward.rewards.video`.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from headwater.errors import HeadwaterError
from headwater_reward.registry import GoldenImage, RewardOptions, RewardParams, Score, ScoreItem
from headwater_reward.rewards import clip, video
from headwater_reward.rewards.color_shape import draw

PICKSCORE_DIVISOR = 26.0
CLIPSCORE_WEIGHT = 2.5


class PickScoreOptions(clip.ClipOptions):
    """Options of `pickscore`."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class ClipScoreOptions(clip.ClipOptions):
    """Options of `clipscore`."""

    model: str = "openai/clip-vit-large-patch14"


class ClipScoreParams(video.FrameParams):
    """Parameters of `clipscore`."""

    prefix: str = Field("", max_length=200)  # put before the prompt


class PromptReward:
    """What the three have in common: one cosine per frame."""

    accepts_video: ClassVar[bool] = True
    by_default: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = clip.REQUIRES
    extra: ClassVar[str] = clip.EXTRA
    params_model: ClassVar[type[RewardParams]] = video.FrameParams

    def __init__(self, name: str, options: clip.ClipOptions) -> None:
        self.name, self._options = name, options

    def load(self, threads: int) -> None:
        """Load the model. Raises `FailedPrecondition` when it cannot be read."""
        self._clip = clip.Clip(self._options, threads)

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """One score per item; `cosine`, the mean over the frames, is a detail."""
        texts = [self.text(item) for item in batch]

        def cosines(frames_HWC: list[np.ndarray], owners: list[int]) -> list[float]:
            texts_ND = self._clip.embed_texts([texts[owner] for owner in owners])
            return (self._clip.embed_images(frames_HWC) * texts_ND).sum(-1).tolist()

        return [
            own if isinstance(own, HeadwaterError) else self._combine(own, item)
            for item, own in zip(batch, clip.frame_values(batch, cosines), strict=True)
        ]

    def _combine(self, cosines: list[float], item: ScoreItem) -> Score:
        details = {"cosine": float(np.mean(cosines))}
        return video.combine([self.scale(cosine) for cosine in cosines], item.params, details)

    def scale(self, cosine: float) -> float:
        """The score of one frame."""
        return cosine

    def text(self, item: ScoreItem) -> str:
        """What the image is compared with."""
        return item.prompt

    def golden_images(self) -> list[GoldenImage]:
        """Two pictures, each of which must score higher with its own prompt than with the other's."""
        red, blue = "a red circle on a white background", "a blue square on a white background"
        return [
            golden
            for color, shape, own, other in (("red", "circle", red, blue), ("blue", "square", blue, red))
            for golden in (
                GoldenImage(f"{color} {shape}", draw(color, shape, 224), own, None, above=f"not a {color} {shape}"),
                GoldenImage(f"not a {color} {shape}", draw(color, shape, 224), other, None),
            )
        ]


class PickScoreReward(PromptReward):
    """Human preference, by PickScore."""

    description: ClassVar[str] = "How much people would prefer the image for its prompt (PickScore / 26)."
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None
    options_model: ClassVar[type[RewardOptions]] = PickScoreOptions

    def scale(self, cosine: float) -> float:
        """Logit / 26."""
        return self._clip.logit_scale * cosine / PICKSCORE_DIVISOR


class ClipScoreReward(PromptReward):
    """Agreement of image and prompt, by CLIP."""

    description: ClassVar[str] = "How well image and prompt agree (CLIPScore)."
    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = 2.5
    params_model: ClassVar[type[RewardParams]] = ClipScoreParams
    options_model: ClassVar[type[RewardOptions]] = ClipScoreOptions

    def scale(self, cosine: float) -> float:
        """2.5 max(cos, 0)."""
        return CLIPSCORE_WEIGHT * max(cosine, 0.0)

    def text(self, item: ScoreItem) -> str:
        """The prompt after the prefix."""
        assert isinstance(item.params, ClipScoreParams)
        return item.params.prefix + item.prompt


class Hpsv2Reward(PromptReward):
    """Human preference, by HPSv2."""

    description: ClassVar[str] = "How much people would prefer the image for its prompt (HPSv2, a cosine)."
    minimum: ClassVar[float | None] = -1.0
    maximum: ClassVar[float | None] = 1.0
    options_model: ClassVar[type[RewardOptions]] = clip.ClipOptions
