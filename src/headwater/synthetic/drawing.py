"""Draws scenes with Pillow, anti-aliased by drawing larger and averaging."""

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from headwater.synthetic.scene import BACKGROUNDS, COLORS, Scene

MAX_TEXT_WIDTH, MAX_TEXT_HEIGHT = 0.84, 0.42  # share of the side
TEXT_STROKE = 0.008  # share of the side by which strokes are thickened on each side
DARK_TEXT, LIGHT_TEXT = (20, 20, 20), (240, 240, 240)
STAR_INNER = 0.45  # inner radius of a star relative to its outer one


def draw(scene: Scene, size_px: int = 64) -> Image.Image:
    """RGB picture of `size_px` x `size_px`."""
    scale = 4 if size_px <= 128 else 2
    image = _background(scene.background, size_px * scale).copy()
    pen = ImageDraw.Draw(image)
    for placed in scene.placed:
        side = size_px * scale
        _draw_shape(pen, placed.shape, placed.x * side, placed.y * side, placed.radius * side, COLORS[placed.color])
    if scene.requirements.text:
        _draw_text(pen, scene, size_px * scale)
    return image.reduce(scale)


@lru_cache(maxsize=32)
def _background(name: str, side: int) -> Image.Image:
    top, bottom = BACKGROUNDS[name]
    if top == bottom:
        return Image.new("RGB", (side, side), top)
    ramp = Image.linear_gradient("L").resize((side, side))  # 0 at the top, 255 at the bottom
    return Image.composite(Image.new("RGB", ramp.size, bottom), Image.new("RGB", ramp.size, top), ramp)


def shape_mask(shape: str, side: int) -> np.ndarray:
    """The ideal shape, bool [side, side], about as large as the square allows."""
    image = Image.new("L", (side, side))
    _draw_shape(ImageDraw.Draw(image), shape, side / 2, side / 2, side * 0.45, 255)
    return np.asarray(image) > 0


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, fill: int | tuple[int, int, int]
) -> None:
    if shape == "circle":
        radius *= 0.95
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif shape == "square":
        radius *= 0.85
        pen.rectangle((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        corners = _TRIANGLE if shape == "triangle" else _STAR
        pen.polygon([(x + radius * dx, y + radius * dy) for dx, dy in corners], fill=fill)


def _star() -> list[tuple[float, float]]:
    turns = [math.pi * k / 5 for k in range(10)]
    return [
        (math.sin(turn) * r, 0.05 - math.cos(turn) * r)
        for turn, r in zip(turns, [1.0, STAR_INNER] * 5, strict=True)
    ]  # fmt: skip


_STAR = _star()
_TRIANGLE = [(0.0, -0.92), (-1.0, 0.82), (1.0, 0.82)]


def _draw_text(pen: ImageDraw.ImageDraw, scene: Scene, side: int) -> None:
    text = scene.requirements.text
    font = _font(_font_size(text, side) * scene.text_scale)
    color = DARK_TEXT if sum(BACKGROUNDS[scene.background][0]) > 384 else LIGHT_TEXT
    where = (scene.text_x * side, scene.text_y * side)
    pen.text(where, text, fill=color, font=font, anchor="mm", stroke_width=TEXT_STROKE * side, stroke_fill=color)


@lru_cache(maxsize=256)
def _font(size: float) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


@lru_cache(maxsize=4096)
def _font_size(text: str, side: int) -> float:
    """The largest size at which the text keeps within its share of the side."""
    left, top, right, bottom = _font(100.0).getbbox(text)
    return 100.0 * side * min(MAX_TEXT_WIDTH / (right - left), MAX_TEXT_HEIGHT / (bottom - top))
