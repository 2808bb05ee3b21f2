"""The self-test of a reward: its golden images, scored like any other media."""

import asyncio
import time
from collections.abc import Sequence

from headwater.errors import HeadwaterError
from headwater.reward.v1.reward_pb2 import RewardCheck
from headwater_reward.batching import PendingItem, RewardQueue
from headwater_reward.registry import GoldenImage, Score, parse_params


async def check(queue: RewardQueue, *, deadline: float) -> RewardCheck:
    """Score the golden images of a queue's reward and compare; `deadline` is on the clock of `time.monotonic()`.

    Raises `OutOfBudget` when the queue is full.
    """
    if own := getattr(queue.reward, "check", None):
        return await asyncio.to_thread(own, deadline - time.monotonic())
    golden = await asyncio.to_thread(queue.reward.golden_images)
    items = [
        PendingItem(
            lambda image=image: image.image_HWC[None],  # type: ignore[misc]
            image.prompt,
            {},
            parse_params(queue.reward.params_model, image.params, field=f"golden {image.name!r}"),
        )
        for image in golden
    ]
    pending = [asyncio.wrap_future(future) for future in queue.submit(items, deadline=deadline)]
    results = [outcome.result for outcome in await asyncio.gather(*pending)]
    return compare(queue.reward.name, golden, results)


def compare(name: str, golden: Sequence[GoldenImage], results: Sequence[Score | HeadwaterError]) -> RewardCheck:
    """Recorded scores against measured ones. A reward without golden images has not shown that it works: it fails."""
    problems, worst = [], 0.0
    values = {g.name: r.value for g, r in zip(golden, results, strict=True) if isinstance(r, Score)}
    for image, result in zip(golden, results, strict=True):
        if isinstance(result, HeadwaterError):
            problems.append(f"{image.name}: {result.message}")
            continue
        if image.recorded_score is not None:
            error = abs(result.value - image.recorded_score)
            worst = max(worst, error)
            if error > image.tolerance:
                problems.append(f"{image.name}: scored {result.value:.4f}, recorded {image.recorded_score:.4f}")
        if image.above and image.above in values and result.value <= values[image.above]:
            problems.append(
                f"{image.name}: scored {result.value:.4f}, not above the {values[image.above]:.4f} of {image.above}"
            )
    if not golden:
        problems.append("the reward has no golden images; add at least one with a high and one with a low score")
    return RewardCheck(
        name=name, passed=not problems, image_count=len(golden), worst_error=worst, detail="; ".join(problems)
    )
