"""Which steps of a rollout are stochastic, round by round: the step strategies of `[sampling]`.

A round is `train.groups_per_step` groups in the order of their numbers, so that the steps of a group follow from its
number and the run's seed alone, and are the same after a resume.
"""

import random
from collections.abc import Sequence
from typing import Literal

StepStrategy = Literal["all", "sde_window", "random_steps", "sliding"]


def random_steps(candidates: Sequence[int], count: int, *, round_number: int, seed: int) -> list[int]:
    """`count` of the `candidates`, increasing, drawn anew for each round (DanceGRPO, arXiv 2505.07818)."""
    return sorted(random.Random(f"{seed}/{round_number}/steps").sample(list(candidates), count))


def sliding_window(begin: int, end: int, size: int, *, stride: int, every: int, round_number: int) -> list[int]:
    """A window of `size` in [begin, end) that moves by `stride` every `every` rounds (MixGRPO, arXiv 2507.21802).

    It moves from early to late steps; the last position ends at `end`, and the first one follows.
    """
    starts = sorted({*range(begin, end - size + 1, stride), end - size})
    start = starts[round_number // every % len(starts)]
    return list(range(start, start + size))
