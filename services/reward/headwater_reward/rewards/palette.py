"""Named colours, and how far a pixel is from them (CIELAB, CIE 1976 colour difference)."""

from collections.abc import Mapping
from functools import cache

import cv2
import numpy as np

# A name covers a pure and, as designers draw it, a muted tone: the distance to a colour is to the nearest of its tones.
PALETTE: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (215, 45, 45)),
    "orange": ((255, 165, 0), (245, 130, 30)),
    "yellow": ((255, 255, 0), (245, 210, 40)),
    "green": ((0, 255, 0), (0, 128, 0), (50, 170, 70)),
    "cyan": ((0, 255, 255), (40, 190, 210)),
    "blue": ((0, 0, 255), (45, 85, 215)),
    "purple": ((128, 0, 128), (140, 60, 190)),
    "magenta": ((255, 0, 255), (215, 50, 180)),
    "white": ((255, 255, 255),),
    "gray": ((128, 128, 128),),
    "black": ((0, 0, 0),),
}
SYNONYMS: Mapping[str, str] = {"grey": "gray", "violet": "purple", "fuchsia": "magenta", "turquoise": "cyan"}


def to_lab(image_HWC: np.ndarray) -> np.ndarray:
    """CIELAB fp32 [H, W, 3] (L in 0..100) of RGB uint8 [H, W, 3]."""
    return cv2.cvtColor(image_HWC.astype(np.float32) / 255.0, cv2.COLOR_RGB2LAB)


@cache
def _tones_lab(name: str) -> np.ndarray:
    return to_lab(np.array([PALETTE[name]], np.uint8))[0]


def distance(lab_HWC: np.ndarray, name: str) -> np.ndarray:
    """Colour difference fp32 [H, W] of each pixel to the nearest tone of a named colour; red to blue is 176."""
    return np.min([np.linalg.norm(lab_HWC - tone, axis=-1) for tone in _tones_lab(name)], axis=0)
