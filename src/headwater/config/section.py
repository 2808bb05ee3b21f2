"""What every section of a recipe is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_INT32_MAX = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=_INT32_MAX)]
NotNegative = Annotated[int, Field(ge=0, le=_INT32_MAX)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of every section: strict types, no unknown keys, values fixed after validation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
