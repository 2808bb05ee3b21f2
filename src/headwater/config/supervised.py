"""Sections of supervised recipes, and those that write pictures and pipelines."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.section import NotNegative, Positive, Section
from headwater.errors import InvalidArgument


class DataSection(Section):
    """`[data]`: pictures with captions, for objective sft. Exactly one of `path` and `generator`."""

    path: str | None = None
    """A .jsonl file, one {"image": file beside it, "prompt": …} a line."""
    generator: Literal["synthetic"] | None = None
    """Pictures drawn by headwater.synthetic, split "train"."""
    count: Positive = 10_000
    """Pictures that the generator draws."""
    seed: NotNegative = 0
    """Seed of the generator."""
    batch_size: Positive = 64
    """Pictures per step, over all ranks."""
    caption_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the pictures trained with sampling.negative_prompt as caption: makes guidance possible."""
    cache_dir: str | None = None
    """Folder of encoded latents and captions; absent: `cache` in the trainer's output folder."""
    processes: Positive = 4
    """Processes that draw or read pictures."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.generator is None):
            raise InvalidArgument(
                "give exactly one of data.path and data.generator", field="data.path", reason="RECIPE_INVALID"
            )
        return self


class EmaSection(Section):
    """`[ema]`: a moving average of the trained weights. sft makes pictures and exports of it; else a KL's reference."""

    max_decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay after n updates is min((1 + n) / (10 + n), max_decay)."""


class PicturesSection(Section):
    """`[pictures]`: a grid of pictures of the first prompts, made by the trainer."""

    every: NotNegative = 0
    """Steps between grids; 0: none."""
    count: Positive = 24
    """Pictures in a grid; prompts repeat, with other seeds, when there are fewer."""


class ExportSection(Section):
    """`[export]`: copies of the whole pipeline with the trained weights."""

    every: NotNegative = 0
    """Steps between exports; 0: only at the end of the run."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type in which the trained component is stored."""
