"""What comes with Headwater: recipes and prompts and, in a source tree, the model in the box."""

from pathlib import Path

import headwater

MODEL_IN_THE_BOX = "tiny-sd3"


def recipe(name: str) -> Path:
    """A file below recipes/, e.g. "quickstart.toml"."""
    return _find("recipes", name)


def model_in_the_box() -> Path:
    """The folder of the pipeline in the source tree; a built package, as in images, is without it."""
    return _find("models", MODEL_IN_THE_BOX)


def _find(*parts: str) -> Path:
    package = Path(headwater.__file__).parent
    places = [root.joinpath(*parts) for root in (package, package.parents[1])]
    return next((place for place in places if place.exists()), places[-1])
