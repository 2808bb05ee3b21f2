"""Checks of a prompt at the door: what no worker could make is refused at once, with the field and the remedy."""

import math
import secrets
from collections.abc import Iterable

from headwater import sampling
from headwater.common.v1.authorization_pb2 import Role
from headwater.errors import HeadwaterError, InvalidArgument
from headwater.rollout.v1.rollout_pb2 import GenerateGroupRequest, GetWorkerInfoResponse, PublishMode
from headwater.router.v1.router_pb2 import Prompt
from headwater.rpc.authorization import require
from headwater.stream.keys import check_id
from headwater_router.config import MAX_TIMEOUT_S

MAX_GROUP_SIZE = 1024
"""Largest group whatever the workers say."""
SEED_BITS = 63


def check_prompt(prompt: Prompt, workers: Iterable[GetWorkerInfoResponse]) -> None:
    """Raise `InvalidArgument` for a prompt that is wrong in itself, or that no registered worker could ever make, and
    `PermissionDenied` for one that takes part in a training run without the role for it.

    `field` is a path below the request, e.g. "prompt.sampling.steps". Unknown rewards and filters are the workers' to
    refuse: the router does not know them.
    """
    infos = list(workers)
    _check_ids(prompt)
    if not prompt.text.strip():
        raise _invalid("text", "is empty; describe what to generate", "PROMPT_EMPTY")
    _check_size_of_group(prompt, infos)
    _check_rewards(prompt)
    if prompt.publish not in PublishMode.values():
        raise _invalid("publish", f"has the unknown value {prompt.publish}; use a PublishMode")
    if prompt.publish == PublishMode.PUBLISH_MODE_STREAM and not prompt.run_id:
        raise _invalid("run_id", "is empty, but publish is STREAM; name the run whose stream gets the group")
    if prompt.run_id:
        require(Role.ROLE_ADMIN, "a prompt of a run (run_id)", field="prompt.run_id")
    if prompt.HasField("timeout"):
        timeout_s = timeout_seconds(prompt, default=0)
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise _invalid("timeout", f"is {timeout_s:g} s; it must be above 0 and at most {MAX_TIMEOUT_S:.0f} s")
    _check_sampling(prompt, infos)


def to_group_request(prompt: Prompt) -> GenerateGroupRequest:
    """What a worker is asked for a checked prompt with its ids filled in; draws the seeds that it does not name."""
    seeds = list(prompt.seeds) or draw_seeds(prompt.sample_count)
    request = GenerateGroupRequest(
        run_id=prompt.run_id, group_id=prompt.group_id, prompt=prompt.text, seeds=seeds, rewards=prompt.rewards,
        publish=prompt.publish, return_media=prompt.return_media, filters=prompt.filters,
    )  # fmt: skip
    for name in ("metadata", "sampling", "min_weight_version"):
        if prompt.HasField(name):
            getattr(request, name).CopyFrom(getattr(prompt, name))
    return request


def draw_seeds(count: int) -> list[int]:
    """`count` distinct random seeds in [0, 2^63)."""
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        seeds[secrets.randbits(SEED_BITS)] = None
    return list(seeds)


def timeout_seconds(prompt: Prompt, *, default: float) -> float:
    """The prompt's timeout in seconds, or `default` when it sets none."""
    return prompt.timeout.seconds + prompt.timeout.nanos * 1e-9 if prompt.HasField("timeout") else default


def _check_ids(prompt: Prompt) -> None:
    for name in ("request_id", "run_id", "group_id"):
        if value := getattr(prompt, name):
            check_id(value, field=f"prompt.{name}")


def _check_size_of_group(prompt: Prompt, infos: list[GetWorkerInfoResponse]) -> None:
    count, name = (len(prompt.seeds), "seeds") if prompt.seeds else (prompt.sample_count, "sample_count")
    if count == 0:
        raise _invalid("sample_count", "is 0 and seeds is empty; ask for at least 1 sample")
    limits = [info.max_group_size or MAX_GROUP_SIZE for info in infos]
    limit = min(MAX_GROUP_SIZE, max(limits, default=MAX_GROUP_SIZE))
    if count > limit:
        raise _invalid(name, f"asks for {count} samples; the largest group here is {limit}; split it into several")


def _check_rewards(prompt: Prompt) -> None:
    seen: set[str] = set()
    for index, reward in enumerate(prompt.rewards):
        if not reward.name or reward.name in seen:
            problem = f"{reward.name!r} twice; name each reward once" if reward.name else "a reward without a name"
            raise _invalid(f"rewards[{index}].name", f"asks for {problem}")
        if reward.HasField("weight") and not math.isfinite(reward.weight):
            raise _invalid(f"rewards[{index}].weight", f"is {reward.weight}; it must be a finite number")
        seen.add(reward.name)


def _check_sampling(prompt: Prompt, infos: list[GetWorkerInfoResponse]) -> None:
    multiples = sorted({max(1, info.size_multiple_px) for info in infos}) or [1]
    for position, multiple in enumerate(multiples):
        try:
            sampling.resolve(prompt.sampling, group_seed=0, size_multiple_px=multiple)
            return
        except HeadwaterError as error:
            if position == len(multiples) - 1:
                message, field = f"prompt.{error.message}", f"prompt.{error.field}"
                raise InvalidArgument(message, field=field, reason=error.reason) from None


def _invalid(field: str, what: str, reason: str = "PROMPT_INVALID") -> InvalidArgument:
    return InvalidArgument(f"prompt.{field} {what}", field=f"prompt.{field}", reason=reason)
