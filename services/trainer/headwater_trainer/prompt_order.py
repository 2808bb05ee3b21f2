"""Which prompt and which seeds each group of a run has: a function of the run's seed and the group's number alone."""

import random
from collections.abc import Sequence

from headwater.config.prompts import PromptItem


def group_id_of(sequence: int) -> str:
    """The id of the group with a number; ids sort by number."""
    return f"g{sequence:08d}"


def sequence_of(group_id: str) -> int:
    """The number of a group. Raises ValueError for an id that `group_id_of` did not make."""
    if not group_id.startswith("g"):
        raise ValueError(f"group id {group_id!r} was not made by this trainer")
    return int(group_id[1:])


class PromptOrder:
    """Passes over all prompts, each in an order of its own, or always in file order."""

    def __init__(self, items: Sequence[PromptItem], *, seed: int, shuffle: bool) -> None:
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._pass = (-1, list(range(len(items))))

    def prompt(self, sequence: int) -> PromptItem:
        """The prompt of group number `sequence`."""
        number, position = divmod(sequence, len(self._items))
        if self._shuffle and self._pass[0] != number:
            order = list(range(len(self._items)))
            random.Random(f"{self._seed}:prompts:{number}").shuffle(order)
            self._pass = (number, order)
        return self._items[self._pass[1][position]]

    def seeds(self, sequence: int, count: int) -> list[int]:
        """The seed of each of the `count` samples of group number `sequence`, 32 bits each."""
        source = random.Random(f"{self._seed}:samples:{sequence}")
        return [source.getrandbits(32) for _ in range(count)]
