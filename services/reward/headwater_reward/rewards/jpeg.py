"""`jpeg_compressibility` and `jpeg_incompressibility`: the size of the image as JPEG, from DDPO (arXiv 2305.13301).

incompressibility = kilobytes (1000 bytes) at quality 95, compressibility = minus that. Flow-GRPO divides the latter by
500: a matter of the reward's weight here.
"""

import io
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PIL import Image

from headwater.errors import HeadwaterError
from headwater_reward.registry import GoldenImage, RewardParams, Score, ScoreItem
from headwater_reward.rewards import video

QUALITY = 95


def kilobytes(image_HWC: np.ndarray) -> float:
    """Size of an RGB uint8 [H, W, 3] image as JPEG, in units of 1000 bytes."""
    buffer = io.BytesIO()
    Image.fromarray(image_HWC).save(buffer, "JPEG", quality=QUALITY)
    return buffer.tell() / 1000


class JpegIncompressibilityReward:
    """Large files."""

    name: ClassVar[str] = "jpeg_incompressibility"
    description: ClassVar[str] = "Size of the image as JPEG of quality 95, in kilobytes."
    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = None
    accepts_video: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ()
    params_model: ClassVar[type[RewardParams]] = video.FrameParams
    sign: ClassVar[float] = 1.0

    def load(self, threads: int) -> None:
        """Nothing to load."""

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """Kilobytes of each item, with the sign of the reward."""
        return [
            video.combine(
                [self.sign * kilobytes(frame) for frame in video.pick(item.frames_FHWC, item.params)], item.params
            )
            for item in batch
        ]

    def golden_images(self) -> list[GoldenImage]:
        """A plain image and noise. The tolerance leaves room for other builds of libjpeg."""
        gray = np.full((64, 64, 3), 128, np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        return [
            GoldenImage("plain gray", gray, "", self.sign * 0.69, tolerance=0.1),
            GoldenImage("noise", noise, "", self.sign * 5.45, tolerance=0.5),
        ]


class JpegCompressibilityReward(JpegIncompressibilityReward):
    """Small files."""

    name: ClassVar[str] = "jpeg_compressibility"
    description: ClassVar[str] = "Minus the size of the image as JPEG of quality 95, in kilobytes."
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = 0.0
    sign: ClassVar[float] = -1.0
