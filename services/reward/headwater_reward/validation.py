"""Checks of what people write, with errors that name the place and the nearest thing that would be right."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headwater.errors import InvalidArgument

_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], values: Mapping[str, Any], *, field: str, reason: str) -> _Model:
    """An instance of a pydantic model. Raises `InvalidArgument` as `parse_params` does."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a typo explains the rest
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            what = f"is unknown; {suggestion(key, model.model_fields)}"
        elif first["type"] == "missing":
            what = f"is missing; {model.model_fields[key].description or 'give it'}"
        else:
            what = f"is {first['input']!r}: {first['msg']}"
        path = f"{field}.{key}" if key else field
        raise InvalidArgument(f"{path} {what}", field=path, reason=reason) from None


def suggestion(name: str, valid: Mapping[str, Any]) -> str:
    """A sentence that names the nearest valid name, if one is near, and all of them."""
    near = get_close_matches(name, list(valid), n=1)
    everything = ", ".join(sorted(valid)) or "none"
    return f"did you mean {near[0]!r}? Known: {everything}" if near else f"known: {everything}"
