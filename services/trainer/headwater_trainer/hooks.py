"""Code of one's own that a recipe names in `[hooks]`, from packages that the trainer was started to allow.

A hook is `module:name`, or the name of an entry point of group `headwater.hooks`.
"""

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import HooksSection, Recipe
from headwater.errors import InvalidArgument

ENTRY_POINT_GROUP = "headwater.hooks"


@dataclass(frozen=True)
class RunHooks:
    """The hooks of a run."""

    objective: Callable[[Recipe], Any] | None = None  # makes an `Objective` that stands in for the one that is named
    filter: Callable[[ScoredGroup], str] | None = None  # why a group that arrived is not trained on; "" keeps it
    steps: Callable[[int, int], Sequence[int]] | None = None  # (round, run.seed) -> stochastic steps, increasing


def load_hooks(section: HooksSection, allowed: Collection[str]) -> RunHooks:
    """Import what `section` names. Raises `InvalidArgument` for code that is not allowed, or not there."""
    named = {key: value for key, value in section.model_dump().items() if value is not None}
    return RunHooks(**{key: _load(key, value, allowed) for key, value in named.items()})


def _load(key: str, value: str, allowed: Collection[str]) -> Callable[..., Any]:
    path = value
    if ":" not in value:
        points = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        if value not in points:
            known = ", ".join(sorted(points)) or "none"
            raise _refused(key, f"is {value!r}, no entry point of {ENTRY_POINT_GROUP} (there are: {known})")
        path = points[value]
    module, _, name = path.partition(":")
    package = module.partition(".")[0]
    if package not in allowed:
        raise _refused(
            key, f"names code of {package!r}; start the trainer with --allow-hooks {package} if you trust it"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _refused(key, f"is {value!r}, which cannot be imported: {error}") from error
    if not callable(found):
        raise _refused(key, f"is {value!r}, which cannot be called")
    return found  # type: ignore[no-any-return]


def _refused(key: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"hooks.{key} {why}", field=f"hooks.{key}", reason="HOOK_REFUSED")
