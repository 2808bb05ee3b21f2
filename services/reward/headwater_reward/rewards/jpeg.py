"""`jpeg_compressibility` and `jpeg_incompressibility`: the size of the image as a JPEG (DDPO, arXiv 2305.13301).

jpeg_incompressibility = kilobytes (1000 bytes) of the image encoded as JPEG of quality 95; jpeg_compressibility = minus
that. The size grows with the number of pixels, so compare only images of one size.
"""

import io
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PIL import Image

from headwater.errors import HeadwaterError
from headwater_reward.registry import GoldenImage, RewardParams, Score, ScoreItem

QUALITY = 95


class JpegIncompressibilityReward:
    """Large files score high: images full of detail."""

    name: ClassVar[str] = "jpeg_incompressibility"
    description: ClassVar[str] = "Kilobytes of the image as JPEG of quality 95: rewards detail."
    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = None
    accepts_video: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ()
    params_model: ClassVar[type[RewardParams]] = RewardParams
    sign: ClassVar[float] = 1.0

    def load(self, threads: int) -> None:
        """Nothing to load; Pillow encodes on the calling thread."""

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """Signed kilobytes."""
        return [Score(self.sign * jpeg_kilobytes(item.frames_FHWC[0])) for item in batch]

    def golden_images(self) -> list[GoldenImage]:
        """A flat image and noise. The tolerance is for other builds of libjpeg."""
        flat = np.full((64, 64, 3), 128, np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, flat.shape, np.uint8)
        return [
            GoldenImage("flat", flat, "", self.sign * 0.689, tolerance=0.2),
            GoldenImage("noise", noise, "", self.sign * 5.446, tolerance=0.4),
        ]


class JpegCompressibilityReward(JpegIncompressibilityReward):
    """Small files score high: plain images."""

    name: ClassVar[str] = "jpeg_compressibility"
    description: ClassVar[str] = "Minus the kilobytes of the image as JPEG of quality 95: rewards plainness."
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = 0.0
    sign: ClassVar[float] = -1.0


def jpeg_kilobytes(image_HWC: np.ndarray) -> float:
    """Size in units of 1000 bytes of an RGB uint8 [H, W, 3] image as JPEG of quality 95."""
    buffer = io.BytesIO()
    Image.fromarray(image_HWC).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000
