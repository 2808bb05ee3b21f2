"""Finds coloured objects before a smooth background and says how well each matches the known shapes and colours.

1. The image is shrunk (or grown) to 64 pixels on its longer side. A plane per channel, fitted to the image's edge
   without what sticks out of it, is the background: plain colours and soft gradients.
2. What differs from it by more than `NOTICE_DISTANCE` (CIELAB) forms regions. Each is cut again at half of its own
   contrast, so that blur moves no outline. Objects of different colours may touch, those of one colour may not.
3. An object's mask is moved and scaled to the centroid and area of each ideal shape; the overlap (intersection over
   union) is its likeness; each shape is tried with sharp and with soft corners. Its colour is the median of its inner
   pixels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import cv2
import numpy as np

from headwater.synthetic.drawing import shape_mask
from headwater.synthetic.scene import COLORS, SHAPES
from headwater_reward.rewards.palette import to_lab

WORK_SIDE_PX, ZOOM = 64, 4
NOTICE_DISTANCE = 20.0
EDGE_PX = 2  # width of the frame that tells the background
OUTLIER = 15.0  # RGB levels: edge pixels further from the plane belong to objects
MIN_AREA = 0.008  # share of the image; smaller regions are specks
MAX_OBJECTS = 8  # the largest are examined; the others are only counted
TEMPLATE_PX, TEMPLATE_AREA = 48, 0.22  # side of the ideal shapes, and their area as a share of the square
SOFTNESS = 0.08  # blur of the soft ideal shapes, as a share of their size
# Colours that an object may have without being an answer to any prompt: white, gray, black, brown.
OTHER_TONES = ((255, 255, 255), (128, 128, 128), (10, 10, 10), (120, 75, 40))
PLAIN_DISTANCE, PLAIN_SHARE = 30.0, 0.8  # this share of an object's inner pixels is this near to their median

_CORE = np.ones((3, 3), np.uint8)  # thinner lines of a colour are the rim of another one


@dataclass(frozen=True)
class Found:
    """An object. Lengths are in pixels of the image that was looked at, 64 on its longer side."""

    likeness: Mapping[str, float]  # overlap with each shape, in [0, 1]
    color: str  # nearest named colour; "" when another tone is nearer or when it has several
    color_distance: Mapping[str, float]  # CIELAB distance to each named colour
    x: float
    y: float
    width: float
    height: float


def find(image_HWC: np.ndarray) -> tuple[list[Found], int]:
    """Objects of an RGB uint8 [H, W, 3] image, the largest regions first, and how many there are in all."""
    image_HWC = _resize(image_HWC)
    lab_HWC = to_lab(image_HWC)
    contrast_HW = np.linalg.norm(lab_HWC - to_lab(background(image_HWC)), axis=-1)
    min_area_px = MIN_AREA * contrast_HW.size
    regions = _regions(contrast_HW > NOTICE_DISTANCE, min_area_px)
    found: list[Found] = []
    for mask_HW, box in regions[:MAX_OBJECTS]:
        window = np.s_[max(0, box.y - 1) : box.y + box.height + 1, max(0, box.x - 1) : box.x + box.width + 1]
        found += _objects(np.where(mask_HW, contrast_HW, 0)[window], lab_HWC[window], window, min_area_px)
    return found, len(found) + max(0, len(regions) - MAX_OBJECTS)


def _objects(
    contrast_HW: np.ndarray, lab_HWC: np.ndarray, window: tuple[slice, slice], min_area_px: float
) -> list[Found]:  # fmt: skip
    """The objects of one region: what rises above half of its contrast, in each of its colours."""
    return [
        found
        for part_HW in _parts(contrast_HW, lab_HWC, min_area_px)
        for found in _objects_of_one_color(part_HW, lab_HWC, window, min_area_px)
    ]


def _objects_of_one_color(
    contrast_HW: np.ndarray, lab_HWC: np.ndarray, window: tuple[slice, slice], min_area_px: float
) -> list[Found]:
    level = float(np.percentile(contrast_HW[contrast_HW > 0], 80))
    zoomed_HW = cv2.resize(contrast_HW, None, fx=ZOOM, fy=ZOOM, interpolation=cv2.INTER_LINEAR)
    found = []
    for mask_HW, box in _regions(zoomed_HW > level / 2, min_area_px * ZOOM**2):
        small_HW = mask_HW[ZOOM // 2 :: ZOOM, ZOOM // 2 :: ZOOM]
        inner_HW = small_HW & (contrast_HW > 0.8 * level)
        color, distances = _color(lab_HWC[inner_HW if inner_HW.any() else small_HW])
        middle = (
            window[1].start + (box.x + box.width / 2) / ZOOM,
            window[0].start + (box.y + box.height / 2) / ZOOM,
        )
        found.append(Found(_likeness(mask_HW), color, distances, *middle, box.width / ZOOM, box.height / ZOOM))
    return found


def _parts(contrast_HW: np.ndarray, lab_HWC: np.ndarray, min_area_px: float) -> list[np.ndarray]:
    """A region's contrast, cut in pieces where objects of different colours touch; 0 outside of the piece."""
    if _is_plain(lab_HWC[contrast_HW > 0]):
        return [contrast_HW]
    names, tones_lab = _tones()
    nearest_HW = np.linalg.norm(lab_HWC[:, :, None] - tones_lab, axis=-1).argmin(axis=-1)
    nearest_HW[contrast_HW == 0] = -1
    masks = [cv2.morphologyEx((nearest_HW == k).astype(np.uint8), cv2.MORPH_OPEN, _CORE) for k in range(len(names))]
    cores = [mask_HW for mask_HW in masks if np.count_nonzero(mask_HW) >= min_area_px]
    if len(cores) < 2:
        return [contrast_HW]
    away = np.stack([cv2.distanceTransform(1 - core_HW, cv2.DIST_L2, 3) for core_HW in cores])
    owner_HW = away.argmin(axis=0)
    return [np.where(owner_HW == k, contrast_HW, 0) for k in range(len(cores))]


def background(image_HWC: np.ndarray) -> np.ndarray:
    """The plane per channel, uint8 [H, W, 3], that the edge of an image lies in."""
    height, width = image_HWC.shape[:2]
    design_ND, edge_N = _design(height, width)
    edge_ND = design_ND[edge_N]
    levels_NC = image_HWC.reshape(-1, 3)[edge_N].astype(np.float32)
    plane_DC = np.zeros((3, 3), np.float32)
    plane_DC[0] = np.median(levels_NC, axis=0)
    tolerance = 4 * OUTLIER  # a gradient's first guess is its middle tone
    for _ in range(3):
        near_N = np.abs(levels_NC - edge_ND @ plane_DC).max(axis=1) <= tolerance
        if np.count_nonzero(near_N) < edge_N.size // 4:
            break
        plane_DC = _plane(edge_ND[near_N], levels_NC[near_N])
        tolerance = OUTLIER
    return (design_ND @ plane_DC).clip(0, 255).round().astype(np.uint8).reshape(height, width, 3)


def _plane(terms_ND: np.ndarray, levels_NC: np.ndarray) -> np.ndarray:
    """Least squares, with a trace of ridge for edges that leave a direction open."""
    return np.linalg.solve(terms_ND.T @ terms_ND + 1e-3 * np.eye(3, dtype=np.float32), terms_ND.T @ levels_NC)


@cache
def _design(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Terms (1, x, y) of every pixel, fp32 [H * W, 3], and the flat indices of those at the edge."""
    y_HW, x_HW = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    frame_HW = np.ones((height, width), bool)
    frame_HW[EDGE_PX:-EDGE_PX, EDGE_PX:-EDGE_PX] = False
    design_ND = np.stack([np.ones_like(x_HW), x_HW, y_HW], axis=-1).reshape(-1, 3).astype(np.float32)
    return design_ND, np.flatnonzero(frame_HW)


class Box(NamedTuple):
    """The bounding box of a region."""

    x: int
    y: int
    width: int
    height: int


def _regions(mask_HW: np.ndarray, min_area_px: float) -> list[tuple[np.ndarray, Box]]:
    """Connected regions of a mask, bool [H, W] each, with their boxes, the largest first, without specks."""
    _, labels_HW, stats, _ = cv2.connectedComponentsWithStats(mask_HW.astype(np.uint8), connectivity=4)
    areas = stats[1:, cv2.CC_STAT_AREA]
    order = [1 + int(label) for label in np.argsort(-areas, kind="stable") if areas[label] >= min_area_px]
    return [(labels_HW == label, Box(*stats[label, :4].tolist())) for label in order]


def _color(lab_NC: np.ndarray) -> tuple[str, dict[str, float]]:
    """Name of the colour of some pixels, "" when there is none, and the distance to each named colour."""
    median = np.median(lab_NC, axis=0)
    names, tones_lab = _tones()
    distances = np.linalg.norm(tones_lab - median, axis=1)
    color = names[int(np.argmin(distances))] if _is_plain(lab_NC) else ""
    return color, {name: float(d) for name, d in zip(names, distances, strict=True) if name}


def _is_plain(lab_NC: np.ndarray) -> bool:
    away_N = np.linalg.norm(lab_NC - np.median(lab_NC, axis=0), axis=1)
    return bool(np.mean(away_N <= PLAIN_DISTANCE) >= PLAIN_SHARE)


@cache
def _tones() -> tuple[list[str], np.ndarray]:
    """Names, "" for tones without one, and CIELAB values [N, 3]."""
    tones = np.array([*COLORS.values(), *OTHER_TONES], np.uint8)
    return [*COLORS, *[""] * len(OTHER_TONES)], to_lab(tones[None])[0]


def _likeness(mask_HW: np.ndarray) -> dict[str, float]:
    normal_HW = normalise(mask_HW)
    return {
        shape: max(
            float(np.count_nonzero(normal_HW & ideal_HW) / np.count_nonzero(normal_HW | ideal_HW))
            for ideal_HW in ideals
        )
        for shape, ideals in _ideals().items()
    }  # fmt: skip


def normalise(mask_HW: np.ndarray) -> np.ndarray:
    """A mask moved and scaled so that its centroid is the middle and its area `TEMPLATE_AREA` of a small square."""
    moments = cv2.moments(mask_HW.astype(np.uint8), binaryImage=True)
    area, middle = moments["m00"], (TEMPLATE_PX - 1) / 2
    scale = (TEMPLATE_AREA * TEMPLATE_PX**2 / area) ** 0.5
    x, y = moments["m10"] / area, moments["m01"] / area
    matrix = np.array([[scale, 0, middle - scale * x], [0, scale, middle - scale * y]])
    grown_HW = cv2.warpAffine(mask_HW.astype(np.float32), matrix, (TEMPLATE_PX, TEMPLATE_PX), flags=cv2.INTER_LINEAR)
    return grown_HW > 0.5


@cache
def _ideals() -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
    """Each shape with sharp corners and with the soft ones that a blurred small drawing has."""
    sharp = {shape: shape_mask(shape, 4 * TEMPLATE_PX) for shape in SHAPES}
    return {shape: (normalise(mask_HW), normalise(_soften(mask_HW))) for shape, mask_HW in sharp.items()}


def _soften(mask_HW: np.ndarray) -> np.ndarray:
    return cv2.GaussianBlur(mask_HW.astype(np.float32), (0, 0), SOFTNESS * mask_HW.shape[0]) > 0.5


def _resize(image_HWC: np.ndarray) -> np.ndarray:
    height, width = image_HWC.shape[:2]
    scale = WORK_SIDE_PX / max(height, width)
    if scale == 1:
        return image_HWC
    size = (max(8, round(width * scale)), max(8, round(height * scale)))
    return cv2.resize(image_HWC, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
