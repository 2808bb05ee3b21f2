"""Read the JSON files of a pipeline folder in diffusers format."""

import json
from pathlib import Path
from typing import Any


def read_config(model_dir: str | Path, relative: str) -> dict[str, Any]:
    """A JSON file of a pipeline folder. Raises ValueError naming the file when it is missing or no JSON object."""
    path = Path(model_dir) / relative
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; model must be the folder of a pipeline in diffusers format") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
