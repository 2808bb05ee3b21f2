"""Before and after pictures of the same prompts and seeds, and the grid that shows them side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from headwater.client import Client, WeightVersion
from headwater.config.recipe import Recipe

TIMEOUT_S = 300.0
_CELL_PX = 112
_LABEL_PX = 16
_GAP_PX = 24


@dataclass(frozen=True)
class Picture:
    """An image and its total reward; None when it could not be scored."""

    image: Image.Image
    reward: float | None


Pictures = dict[str, list[Picture]]  # by prompt, in seed order


def take(
    router: str, recipe: Recipe, prompts: Sequence[str], seeds: Sequence[int], oldest: WeightVersion | None = None
) -> Pictures:
    """Deterministic (ODE) pictures of each prompt, with `oldest` or newer weights. Raises what the client raises."""
    rewards = [reward.to_proto() for reward in recipe.rewards]
    sampling = recipe.sampling.to_ode_proto()
    with Client(router) as client:
        found = {}
        for prompt in prompts:
            if oldest is None:
                group = client.submit(prompt, seeds=seeds, sampling=sampling, rewards=rewards, timeout_s=TIMEOUT_S)
            else:
                group = client.submit(
                    prompt,
                    seeds=seeds,
                    sampling=sampling,
                    rewards=rewards,
                    timeout_s=TIMEOUT_S,
                    min_weight_version=oldest,
                )
            found[prompt] = [Picture(sample.image.convert("RGB"), sample.total_reward) for sample in group.samples]
    return found


def mean_reward(pictures: Pictures) -> float | None:
    """Mean over all scored pictures."""
    rewards = [picture.reward for row in pictures.values() for picture in row if picture.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def save_grid(before: Pictures, after: Pictures, path: Path, titles: tuple[str, str]) -> None:
    """A PNG with one row per prompt: before on the left, after on the right, the reward below each picture."""
    columns = max(len(row) for row in before.values())
    half = columns * (_CELL_PX + 4)
    row_height = _LABEL_PX + _CELL_PX + _LABEL_PX + 6
    grid = Image.new("RGB", (2 * half + _GAP_PX + 8, _LABEL_PX + 8 + row_height * len(before)), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(12)
    for side, title in enumerate(titles):
        draw.text((8 + side * (half + _GAP_PX), 4), title, fill="black", font=font)
    for row, prompt in enumerate(before):
        top = _LABEL_PX + 8 + row * row_height
        draw.text((8, top), prompt, fill="black", font=font)
        for side, pictures in enumerate((before[prompt], after.get(prompt, []))):
            for column, picture in enumerate(pictures):
                left = 8 + side * (half + _GAP_PX) + column * (_CELL_PX + 4)
                cell = picture.image.resize((_CELL_PX, _CELL_PX), Image.Resampling.NEAREST)
                grid.paste(cell, (left, top + _LABEL_PX))
                label = "no score" if picture.reward is None else f"{picture.reward:.3f}"
                draw.text((left, top + _LABEL_PX + _CELL_PX), label, fill="black", font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path)
