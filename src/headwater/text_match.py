"""How well recognised text matches the text that a prompt asks for. No torch."""


def ocr_score(prompt: str, recognised: str) -> float:
    """Score in [0, 1] of `recognised` against the text between the first two double quotes of `prompt` (Flow-GRPO).

    Both sides are lower-cased and lose their spaces. 1 when the target is contained in the recognised text, else
    1 - min(edit distance, n) / n for a target of n characters. Raises ValueError for a prompt without quoted text.
    """
    target = _normalised(quoted_text(prompt))
    if not target:
        raise ValueError(f"the quoted text of prompt {prompt!r} is empty; quote the words the picture should show")
    text = _normalised(recognised)
    if target in text:
        return 1.0
    return 1.0 - min(edit_distance(target, text), len(target)) / len(target)


def quoted_text(prompt: str) -> str:
    """The text between the first two double quotes of `prompt`. Raises ValueError when there are fewer than two."""
    parts = prompt.split('"', 2)
    if len(parts) < 3:
        raise ValueError(f'prompt {prompt!r} has no text in double quotes; write it like: a sign that says "hello"')
    return parts[1]


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions cost 1."""
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        current = [i]
        for j, right in enumerate(b, start=1):
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


def _normalised(text: str) -> str:
    return text.lower().replace(" ", "")
