"""What a prompt asks for (`Requirements`), what a picture shows (`Scene`), and the vocabulary of both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHAPE_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")  # the tags of GenEval
TAGS = (*SHAPE_TAGS, "text")
SHAPES = ("circle", "square", "triangle", "star")
COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 35, 35),
    "orange": (245, 135, 20),
    "yellow": (245, 220, 40),
    "green": (40, 160, 65),
    "cyan": (30, 195, 215),
    "blue": (35, 85, 225),
    "purple": (145, 40, 160),
    "pink": (250, 135, 190),
}
# Top and bottom tone of each background; the tones between are linear.
BACKGROUNDS: Mapping[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "white": ((255, 255, 255), (255, 255, 255)),
    "light gray": ((205, 205, 205), (205, 205, 205)),
    "dark gray": ((75, 75, 75), (75, 75, 75)),
    "black": ((8, 8, 8), (8, 8, 8)),
    "cream": ((250, 240, 215), (250, 240, 215)),
    "navy": ((25, 30, 60), (25, 30, 60)),
    "light gradient": ((255, 255, 255), (200, 205, 215)),
    "dark gradient": ((15, 15, 20), (80, 80, 85)),
}
OPPOSITE: Mapping[str, str] = {"left_of": "right_of", "right_of": "left_of", "above": "below", "below": "above"}
RELATIONS = tuple(OPPOSITE)
MAX_COUNT = 4


@dataclass(frozen=True)
class Wanted:
    """`count` objects of one shape; `color` None accepts any colour. Raises ValueError outside the vocabulary."""

    shape: str
    color: str | None = None
    count: int = 1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape is {self.shape!r}; supported: {', '.join(SHAPES)}")
        if self.color is not None and self.color not in COLORS:
            raise ValueError(f"color is {self.color!r}; supported: {', '.join(COLORS)}")
        if not 1 <= self.count <= MAX_COUNT:
            raise ValueError(f"count is {self.count}; supported: 1 to {MAX_COUNT}")


@dataclass(frozen=True)
class Requirements:
    """What a picture must show: either objects, and nothing else, or a text.

    `relation` says where the first object is, seen from the second.
    """

    tag: str
    objects: tuple[Wanted, ...] = ()
    relation: str | None = None
    text: str = ""

    def __post_init__(self) -> None:
        if self.tag not in TAGS:
            raise ValueError(f"tag is {self.tag!r}; supported: {', '.join(TAGS)}")
        if (self.tag == "text") != bool(self.text) or bool(self.text) == bool(self.objects):
            raise ValueError("a text prompt has a text and no objects; any other prompt has objects and no text")
        if self.relation is not None and (self.relation not in RELATIONS or len(self.objects) != 2):
            raise ValueError(
                f"relation is {self.relation!r} between {len(self.objects)} kinds of objects; "
                f"supported: {', '.join(RELATIONS)}, between two"
            )

    def to_metadata(self) -> dict[str, Any]:
        """JSON for a prompt's metadata; what is not asked for is left out."""
        if self.text:
            return {"tag": self.tag, "text": self.text}
        objects = [{k: v for k, v in vars(wanted).items() if v is not None} for wanted in self.objects]
        relation = {"relation": self.relation} if self.relation else {}
        return {"tag": self.tag, "objects": objects, **relation}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Requirements":
        """Inverse of `to_metadata`; counts may be floats, as protobuf's Struct makes them. Raises ValueError."""
        try:
            objects = tuple(
                Wanted(entry["shape"], entry.get("color"), int(entry.get("count", 1)))
                for entry in metadata.get("objects", ())
            )
            return cls(metadata["tag"], objects, metadata.get("relation"), metadata.get("text", ""))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"metadata {dict(metadata)!r} is malformed ({type(error).__name__}: {error}); write it like "
                '{"tag": "colors", "objects": [{"shape": "circle", "color": "red", "count": 1}]}'
            ) from None


@dataclass(frozen=True)
class Placed:
    """A drawn object; centre and radius of its bounding circle in shares of the image's shorter side."""

    shape: str
    color: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """A picture to be drawn and what its caption says about it."""

    requirements: Requirements
    placed: tuple[Placed, ...]
    background: str
    names_background: bool = False
    text_scale: float = 1.0  # height of the text relative to the largest
    text_x: float = 0.5  # centre of the text, in shares of the image's side
    text_y: float = 0.5
