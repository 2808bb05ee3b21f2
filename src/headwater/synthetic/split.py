"""Which combinations are held out for evaluation. Fixed rules, so that files made at any time agree.

- alike: shape, colour and count of objects that are all alike. Each colour misses one shape per count (a quarter).
- pair: two different objects, and how they lie to each other ("a left of b" is "b right of a"). A hash holds out a
  fifth.
- setting: the shapes before a background; the only combination in prompts that name no colour. Each background misses
  one shape alone and one pair of shapes (a quarter and a sixth).
- text: the text. A hash holds out a fifth.

A picture is for training only when none of its combinations is held out: neither those its caption tells nor those that
are only seen. Every shape, colour, count, relation and background by itself is trained.
"""

import zlib
from functools import lru_cache
from itertools import combinations

from headwater.synthetic.scene import BACKGROUNDS, COLORS, OPPOSITE, SHAPES, Placed, Scene

SPLITS = ("train", "eval")
HASH_HELD_OUT_PERCENT = 20
_COLORS, _BACKGROUNDS = tuple(COLORS), tuple(BACKGROUNDS)
_SHAPE_PAIRS = tuple(combinations(sorted(SHAPES), 2))


def is_for(split: str, scene: Scene) -> bool:
    """Whether a scene belongs to a split. Some belong to none: they show what an evaluation prompt asks for."""
    wanted = scene.requirements
    if split == "train":
        return not (_content_held_out(scene, None) or _setting_held_out(scene) or _seen_pair_held_out(scene))
    if wanted.objects and all(one.color is None for one in wanted.objects):
        return _setting_held_out(scene)
    return _content_held_out(scene, wanted.relation)


def seen_relation(first: Placed, second: Placed) -> str:
    """Where the first of two objects is, seen from the second, along the axis on which they are further apart."""
    dx, dy = first.x - second.x, first.y - second.y
    if abs(dx) > abs(dy):
        return "left_of" if dx < 0 else "right_of"
    return "above" if dy < 0 else "below"


def _content_held_out(scene: Scene, relation: str | None) -> bool:
    if scene.requirements.text:
        return _hashed_out(f"text {scene.requirements.text}")
    names = [f"{one.color} {one.shape}" for one in scene.placed]
    if len(set(names)) == 1:
        first = scene.placed[0]
        return SHAPES[(_COLORS.index(first.color) + len(names) - 1) % len(SHAPES)] == first.shape
    if relation in ("right_of", "below"):
        names, relation = names[::-1], OPPOSITE[relation]
    return _hashed_out(f" {relation} ".join(names) if relation else " + ".join(sorted(names)))


def _seen_pair_held_out(scene: Scene) -> bool:
    return len(scene.placed) == 2 and _content_held_out(scene, seen_relation(*scene.placed))


def _setting_held_out(scene: Scene) -> bool:
    number = _BACKGROUNDS.index(scene.background)
    shapes = tuple(sorted(one.shape for one in scene.placed))
    if len(shapes) == 1:
        return SHAPES[number % len(SHAPES)] == shapes[0]
    return len(shapes) == 2 and _SHAPE_PAIRS[number % len(_SHAPE_PAIRS)] == shapes


@lru_cache(maxsize=65_536)
def _hashed_out(key: str) -> bool:
    return zlib.crc32(f"headwater-1:{key}".encode()) % 100 < HASH_HELD_OUT_PERCENT
