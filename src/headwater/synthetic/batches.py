"""Draw many samples with several processes."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from headwater.synthetic.generate import sample

_CHUNK = 256


def batches(
    count: int, *, seed: int = 0, split: str = "train", size_px: int = 64, processes: int = 4
) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Samples 0 to `count` - 1 in order: pictures uint8 [n, H, W, 3] and their captions."""
    jobs = [(seed, begin, min(begin + _CHUNK, count), split, size_px) for begin in range(0, count, _CHUNK)]
    if processes == 1 or len(jobs) == 1:
        yield from map(_draw, jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_draw, jobs)


def _draw(job: tuple[int, int, int, str, int]) -> tuple[np.ndarray, list[str]]:
    seed, begin, end, split, size_px = job
    samples = [sample(seed, index, split, size_px=size_px) for index in range(begin, end)]
    return np.stack([one.image_HWC for one in samples]), [one.caption for one in samples]
