"""`aesthetic`: how beautiful an image is, about 1 to 10: a linear head on the CLIP embedding of length 1.

The head is LAION's: one affine map, or the improved predictor's stack of them, which has no activations in between
(dropout does nothing when scoring). Its public file is a pickle, which is not read: services/reward/README.md says
how to make safetensors of it, with keys `….weight` [out, in] and `….bias` [out], in the order of the numbers in them.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from headwater.errors import FailedPrecondition, HeadwaterError
from headwater_reward.registry import GoldenImage, RewardOptions, RewardParams, Score, ScoreItem
from headwater_reward.rewards import clip, video
from headwater_reward.rewards.color_shape import draw

if TYPE_CHECKING:
    import torch


class AestheticOptions(clip.ClipOptions):
    """Options of `aesthetic`."""

    model: str = "openai/clip-vit-large-patch14"
    head: str = Field(description="give the safetensors file of the linear head")


class AestheticReward:
    """Beauty, whatever the prompt."""

    description: ClassVar[str] = "How beautiful people would find the image, about 1 to 10; the prompt does not matter."
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None
    accepts_video: ClassVar[bool] = True
    by_default: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = clip.REQUIRES
    extra: ClassVar[str] = clip.EXTRA
    params_model: ClassVar[type[RewardParams]] = video.FrameParams
    options_model: ClassVar[type[RewardOptions]] = AestheticOptions

    def __init__(self, name: str, options: AestheticOptions) -> None:
        self.name, self._options = name, options

    def load(self, threads: int) -> None:
        """Load model and head. Raises `FailedPrecondition` when one cannot be read or they do not fit."""
        self._clip = clip.Clip(self._options, threads)
        self._head = _read_head(self._options.head, self._clip.width)

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """One score per item."""
        return [
            own if isinstance(own, HeadwaterError) else video.combine(own, item.params)
            for item, own in zip(batch, clip.frame_values(batch, self._values), strict=True)
        ]

    def _values(self, frames_HWC: list[np.ndarray], owners: list[int]) -> list[float]:
        values_ND = self._clip.embed_images(frames_HWC)
        for weight, bias in self._head:
            values_ND = values_ND @ weight.T + bias
        return values_ND[:, 0].tolist()

    def golden_images(self) -> list[GoldenImage]:
        """Any picture lies well inside 1 to 10; a wrong head or a wrong CLIP model leaves that range."""
        noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
        return [
            GoldenImage("a drawn circle", draw("red", "circle", 224), "", 5.0, tolerance=4.5),
            GoldenImage("noise", noise, "", 5.0, tolerance=4.5),
        ]


def _read_head(path: str, width: int) -> list[tuple["torch.Tensor", "torch.Tensor"]]:
    """Affine maps (weight [out, in], bias [out]), fp32, the first one from `width`, the last one to 1."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    def number(key: str) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d+", key)]

    try:
        tensors = load_file(path)
        keys = sorted((key for key in tensors if key.endswith("weight")), key=number)
        maps = [(tensors[key].float(), tensors[key.removesuffix("weight") + "bias"].float()) for key in keys]
    except (OSError, SafetensorError, KeyError) as error:
        raise FailedPrecondition(
            f"the head {path!r} cannot be read: {error}. It must be a safetensors file with a bias for each weight; a "
            "pickled .pth must be converted once (services/reward/README.md)",
            reason="REWARD_MODEL_INVALID",
        ) from error
    sizes = [width, *(len(bias) for _, bias in maps)]
    shapes = [tuple(weight.shape) for weight, _ in maps]
    if not maps or sizes[-1] != 1 or shapes != list(zip(sizes[1:], sizes[:-1], strict=True)):
        raise FailedPrecondition(
            f"the head {path!r} has weights of shapes {shapes}, which do not lead from the {width} numbers of a CLIP "
            "embedding to 1; use the head that was trained on this CLIP model",
            reason="REWARD_MODEL_INVALID",
        )
    return maps
