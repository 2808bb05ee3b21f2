"""Captions of scenes, in natural variants, and back: `parse` reads what a prompt asks for."""

import random
import re
from collections.abc import Mapping

from headwater.synthetic.scene import COLORS, SHAPES, Requirements, Scene, Wanted

NUMBERS = ("one", "two", "three", "four")
OPENINGS = ("", "", "", "a picture of ", "a drawing of ", "an image of ")  # half of the captions have none
RELATION_WORDS: Mapping[str, tuple[str, ...]] = {
    "left_of": ("left of", "to the left of", "on the left of"),
    "right_of": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
WORD_CAPTIONS = ('the word "{}"', 'a sign with the word "{}"', 'a sign that says "{}"', 'the text "{}"')
NUMBER_CAPTIONS = ('the number "{}"', 'a sign with the number "{}"', 'a sign that says "{}"', 'the digits "{}"')

_COLOR_WORDS = {name: name for name in COLORS} | {"violet": "purple", "turquoise": "cyan"}
_SHAPE_WORDS = {name + ending: name for name in SHAPES for ending in ("", "s")} | dict.fromkeys(
    ("disc", "discs", "disk", "disks"), "circle"
)
_NUMBER_WORDS = {word: n for n, word in enumerate(NUMBERS, 1)} | {"a": 1, "an": 1, "single": 1}
_RELATION_OF = {"left": "left_of", "right": "right_of", "above": "above", "over": "above", "below": "below"} | {
    "under": "below", "beneath": "below", "underneath": "below", "atop": "above"
}  # fmt: skip
_RESET_WORDS = frozenset(_RELATION_OF) | {"and", "of", "on", "the", "with"}


def caption(scene: Scene, rng: random.Random) -> str:
    """A caption that is true of the scene; `rng` chooses its wording."""
    wanted = scene.requirements
    if wanted.text:
        variants = NUMBER_CAPTIONS if wanted.text.isdigit() else WORD_CAPTIONS
        core = rng.choice(variants).format(wanted.text)
    else:
        joint = f" {rng.choice(RELATION_WORDS[wanted.relation])} " if wanted.relation else " and "
        core = rng.choice(OPENINGS) + joint.join(_phrase(o, rng, alone=not wanted.objects[1:]) for o in wanted.objects)
    return f"{core} on a {scene.background} background" if scene.names_background else core


def _phrase(wanted: Wanted, rng: random.Random, *, alone: bool) -> str:
    noun = wanted.shape if wanted.color is None else f"{wanted.color} {wanted.shape}"
    if wanted.count > 1:
        return f"{NUMBERS[wanted.count - 1] if rng.random() < 0.8 else wanted.count} {noun}s"
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{rng.choice((article, article, 'one', 'a single')) if alone else article} {noun}"


def parse(prompt: str) -> Requirements:
    """What a prompt asks for. Text in double quotes makes it a text prompt; a number defaults to one.

    Raises ValueError for a prompt that names no shape, several shapes without a number, or what cannot be verified.
    """
    if prompt.count('"') >= 2:
        return Requirements("text", text=prompt.split('"', 2)[1])
    objects: list[Wanted] = []
    relation: str | None = None
    count, color = None, None
    for word in re.findall(r"[a-z]+|\d+", prompt.lower()):
        if word in _SHAPE_WORDS:
            if count is None and word.endswith("s"):
                raise ValueError(f"prompt {prompt!r} does not say how many {word}; write a number from one to four")
            objects.append(Wanted(_SHAPE_WORDS[word], color, count or 1))
            count, color = None, None
            continue
        if word in _RESET_WORDS:
            count, color = None, None
        relation = relation or (_RELATION_OF.get(word) if objects else None)
        count = int(word) if word.isdigit() else _NUMBER_WORDS.get(word, count)
        color = _COLOR_WORDS.get(word, color)
    if not objects:
        raise ValueError(f"prompt {prompt!r} names no shape; supported: {', '.join(SHAPES)}")
    relation = relation if len(objects) == 2 else None
    return Requirements(_tag(objects, relation), tuple(objects), relation)


def _tag(objects: list[Wanted], relation: str | None) -> str:
    if relation:
        return "position"
    if any(wanted.count > 1 for wanted in objects):
        return "counting"
    colored = any(wanted.color for wanted in objects)
    if len(objects) == 1:
        return "colors" if colored else "single_object"
    return "color_attr" if colored else "two_object"
