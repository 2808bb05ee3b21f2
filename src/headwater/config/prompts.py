"""The prompts of a recipe, from inline texts, a text file or a JSONL file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.config.recipe import PromptsSection
from headwater.errors import InvalidArgument


@dataclass(frozen=True)
class PromptItem:
    """A prompt and the metadata that its rewards may read."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def load_prompts(section: PromptsSection) -> list[PromptItem]:
    """All prompts in file order. Raises `InvalidArgument` naming file and line."""
    if section.texts is not None:
        return [PromptItem(text) for text in section.texts]
    path = Path(section.path or "")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise _invalid(f"{path} cannot be read: {e}") from e
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    items = [parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise _invalid(f"{path} holds no prompt; write one a line")
    return items


def _from_text(line: str, where: str) -> PromptItem:
    return PromptItem(line.strip())


def _from_json(line: str, where: str) -> PromptItem:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as e:
        raise _invalid(f"{where} is not JSON: {e}") from e
    unknown = set(entry) - {"prompt", "metadata"} if isinstance(entry, dict) else set()
    text = entry.get("prompt") if isinstance(entry, dict) else None
    if unknown or not isinstance(text, str) or not text.strip() or not isinstance(entry.get("metadata", {}), dict):
        raise _invalid(
            f'{where} must be an object {{"prompt": "…", "metadata": {{…}}}} with a prompt that is not empty'
        )
    return PromptItem(text, entry.get("metadata", {}))


def _invalid(message: str) -> InvalidArgument:
    return InvalidArgument(f"prompts.path: {message}", field="prompts.path", reason="RECIPE_INVALID")
