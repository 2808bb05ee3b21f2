"""The picture grid of an evaluation: a row per tag, the first image of a few prompts, prompt and score below each."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from headwater.evaluation.collect import Picture

_CELL_PX = 144
_GAP_PX = 8
_LINE_PX = 14
_PROMPT_LINES = 3
_TITLE_PX = 18

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def save_grid(pictures: Sequence[Picture], path: Path, title: str, per_tag: int) -> bool:
    """Write a PNG; False, and no file, when there is no picture."""
    rows: dict[str, list[Picture]] = {}
    for picture in pictures:
        row = rows.setdefault(picture.tag, [])
        if len(row) < per_tag:
            row.append(picture)
    rows = {tag: row for tag, row in rows.items() if row}
    if not rows:
        return False
    font = ImageFont.load_default(11)
    columns = max(len(row) for row in rows.values())
    row_px = _TITLE_PX + _CELL_PX + _LINE_PX * (_PROMPT_LINES + 1) + _GAP_PX
    size = (_GAP_PX + columns * (_CELL_PX + _GAP_PX), _TITLE_PX + _GAP_PX + row_px * len(rows))
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)
    draw.text((_GAP_PX, 3), _wrap(title, font, size[0] - 2 * _GAP_PX, 1)[0], fill="black", font=font)
    for number, (tag, row) in enumerate(rows.items()):
        top = _TITLE_PX + _GAP_PX + number * row_px
        draw.text((_GAP_PX, top), tag, fill="black", font=ImageFont.load_default(13))
        for column, picture in enumerate(row):
            _cell(grid, draw, picture, _GAP_PX + column * (_CELL_PX + _GAP_PX), top + _TITLE_PX, font)
    grid.save(path)
    return True


def _cell(grid: Image.Image, draw: ImageDraw.ImageDraw, picture: Picture, left: int, top: int, font: Font) -> None:
    scale = _CELL_PX / max(picture.image.size)
    width, height = (max(1, round(side * scale)) for side in picture.image.size)
    method = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
    grid.paste(picture.image.resize((width, height), method), (left, top))
    score = "no score" if picture.score is None else f"score {picture.score:.3f}"
    for number, line in enumerate([score, *_wrap(picture.prompt, font, _CELL_PX, _PROMPT_LINES)]):
        draw.text((left, top + _CELL_PX + 1 + number * _LINE_PX), line, fill="black", font=font)


def _wrap(text: str, font: Font, width_px: int, lines: int) -> list[str]:
    """At most `lines` lines of words that fit; what does not ends in an ellipsis."""
    found = [""]
    for word in text.split():
        longer = f"{found[-1]} {word}".lstrip()
        if font.getlength(longer) <= width_px or not found[-1]:
            found[-1] = longer
        elif len(found) < lines:
            found.append(word)
        else:
            found[-1] += "…"
            break
    for number, line in enumerate(found):
        while font.getlength(line) > width_px and len(line) > 2:
            line = line.rstrip("…")[:-1] + "…"
        found[number] = line
    return found
