"""Recipes from TOML and `key=value` overrides. Mistakes are `InvalidArgument`s that name the key and a remedy."""

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from headwater.config.recipe import Recipe
from headwater.errors import InvalidArgument, NotFound


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides.

    Relative prompt and data files are looked up from the current folder, then from the recipe's, and made absolute.
    Raises `NotFound` for a missing file, `InvalidArgument` for anything wrong in it.
    """
    return _recipe(load_table(path, overrides), source=str(path), folders=(Path.cwd(), path.parent))


def load_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw table of a recipe file with overrides applied, not yet validated."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"there is no recipe {path}; the recipes in the box are in recipes/", field="recipe") from None
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"the recipe {path} cannot be read: {e}", field="recipe") from e
    table = parse_table(text, source=str(path))
    for override in overrides:
        apply_override(table, override)
    return table


def parse_recipe(text: str, *, source: str = "recipe") -> Recipe:
    """A recipe from TOML text, as StartRun carries it. Raises `InvalidArgument`."""
    return _recipe(parse_table(text, source=source), source=source, folders=(Path.cwd(),))


def recipe_from_table(table: dict[str, Any], *, source: str = "recipe") -> Recipe:
    """A recipe from a table made by `load_table`. Raises `InvalidArgument`."""
    return _recipe(table, source=source, folders=(Path.cwd(), Path(source).parent))


def dump_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML: every value written out, absent optional ones left out."""
    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def parse_table(text: str, *, source: str) -> dict[str, Any]:
    """TOML text as a table. Raises `InvalidArgument` naming the line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InvalidArgument(f"{source} is not valid TOML: {e}", field="recipe", reason="RECIPE_INVALID") from e


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in a table.

    The value is read as TOML (`3`, `0.1`, `true`, `["a"]`); what is not TOML is taken as text (`model.path=m/sd3`).
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InvalidArgument(
            f"{override!r} is not an override; write section.key=value, for example train.steps=20", field=override
        )
    *parents, last = key.split(".")
    node: Any = table
    for part in parents:
        node = _child(node, part, key)
    if isinstance(node, list):
        node[_index(node, last, key)] = _value(text)
    elif isinstance(node, dict):
        node[last] = _value(text)
    else:
        raise _unknown(key)


def _child(node: Any, part: str, key: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, key)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise _unknown(key)


def _index(node: list[Any], part: str, key: str) -> int:
    if part.isdecimal() and int(part) < len(node):
        return int(part)
    raise InvalidArgument(
        f"{key}: {part!r} is not a position in a list of {len(node)}; count from 0", field=key, reason="RECIPE_INVALID"
    )


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _recipe(table: dict[str, Any], *, source: str, folders: Iterable[Path]) -> Recipe:
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as e:
        raise _from_validation(e, source) from e
    folders = tuple(folders)
    update: dict[str, Any] = {}
    for key, section in (("prompts", recipe.prompts), ("data", recipe.data)):
        if section is not None and section.path is not None:
            update[key] = section.model_copy(update={"path": _found(section.path, f"{key}.path", folders)})
    return recipe.model_copy(update=update)


def _found(path: str, key: str, folders: Iterable[Path]) -> str:
    found = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if found is None:
        raise InvalidArgument(f"{key}: there is no file {path}", field=key, reason="RECIPE_INVALID")
    return str(found.resolve())


def _from_validation(error: ValidationError, source: str) -> InvalidArgument:
    """The first mistake in full, and which more there are. Unknown keys come first: they explain missing ones."""
    first, *rest = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        found = _unknown(key)
    elif first["type"] == "missing":
        found = _invalid(key, f"{key} is missing; add it to {source} or pass {key}=VALUE")
    else:
        found = _invalid(key, f"{key} is {first['input']!r}: {first['msg']}")
    if rest:
        others = ", ".join(sorted({".".join(map(str, e["loc"])) for e in rest}))
        found = InvalidArgument(f"{found.message} (also wrong: {others})", field=found.field, reason=found.reason)
    return found


def _invalid(key: str, message: str) -> InvalidArgument:
    return InvalidArgument(message, field=key, reason="RECIPE_INVALID")


def _unknown(key: str) -> InvalidArgument:
    """An unknown key, with the nearest valid one: full key first, then the last part alone."""
    known = valid_keys()
    plain = ".".join("N" if part.isdecimal() else part for part in key.split("."))
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    if not near:
        last = plain.rsplit(".", 1)[-1]
        ends = {name.rsplit(".", 1)[-1]: name for name in known}
        near = [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(plain, known, n=1, cutoff=0.0)
    return InvalidArgument(
        f"unknown recipe key {key!r}; the nearest valid key is {near[0]!r}", field=key, reason="RECIPE_UNKNOWN_KEY"
    )


def valid_keys() -> list[str]:
    """Every dotted key of a recipe; `N` stands for a position in a list."""
    return _keys(Recipe, "")


def _keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is None:
            keys.append(prefix + name)
        else:
            model_of, is_list = section
            keys.extend(_keys(model_of, f"{prefix}{name}.N." if is_list else f"{prefix}{name}."))
    return keys


def _section(annotation: Any) -> tuple[type[BaseModel], bool] | None:
    """(section model, whether it is in a list) behind an annotation, or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for inner in get_args(annotation):
        found = _section(inner)
        if found is not None:
            return found[0], found[1] or getattr(annotation, "__origin__", None) is list
    return None
