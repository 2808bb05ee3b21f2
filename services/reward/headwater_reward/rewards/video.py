"""Frames of a video for rewards that score images: which ones are looked at, and how their scores become one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from headwater_reward.registry import RewardParams, Score


class FrameParams(RewardParams):
    """Parameters of every reward that scores single frames. An image has one frame, so nothing changes for it."""

    frames: int = Field(8, ge=1, le=64)  # at most so many, evenly spaced, the first and the last among them
    aggregate: Literal["mean", "min", "max"] = "mean"  # of the scores of the frames


_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)), "min": min, "max": max,
}  # fmt: skip


def pick(frames_FHWC: np.ndarray, params: RewardParams) -> np.ndarray:
    """The frames that are scored, uint8 [f, H, W, 3]."""
    assert isinstance(params, FrameParams)
    count = min(params.frames, len(frames_FHWC))
    return frames_FHWC[np.linspace(0, len(frames_FHWC) - 1, count).round().astype(int)]


def combine(values: Sequence[float], params: RewardParams, details: Mapping[str, float] | None = None) -> Score:
    """One score of the scores of the frames; a video has its lowest and highest frame as details."""
    assert isinstance(params, FrameParams)
    extremes = {"lowest_frame": min(values), "highest_frame": max(values)} if len(values) > 1 else {}
    return Score(_COMBINE[params.aggregate](values), {**(details or {}), **extremes})
