"""What comes with Headwater: recipes and prompts, in the installed package or a source tree, and in the latter the model."""

from pathlib import Path

import headwater

MODEL_IN_THE_BOX = "tiny-sd3"


def recipe(name: str) -> Path:
    """A file below recipes/, e.g. "quickstart.toml"."""
    return _find("recipes", name)


def model_in_the_box() -> Path:
    """The folder of the pipeline that comes with Headwater's source tree; a built package, as in images, is without it."""
    return _find("models", MODEL_IN_THE_BOX)


def _find(*parts: str) -> Path:
    package = Path(headwater.__file__).parent
    places = [root.joinpath(*parts) for root in (package, package.parents[1])]
    return next((place for place in places if place.exists()), places[-1])
