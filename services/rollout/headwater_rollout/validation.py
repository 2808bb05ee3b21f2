"""Checks of a GenerateGroupRequest that need no engine run. Every error names the field and the remedy."""

import math
from collections.abc import Sequence

from headwater import sampling
from headwater.common.v1.reward_pb2 import RewardFailurePolicy, RewardRole, RewardSpec
from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import FailedPrecondition, InvalidArgument
from headwater.rollout.v1.rollout_pb2 import GenerateGroupRequest, PublishMode
from headwater.stream.keys import MAX_ENTRY_BYTES, check_id
from headwater.versions import satisfies
from headwater_rollout import filters

MAX_PROMPT_BYTES = 8 * 1024


def check_request(
    request: GenerateGroupRequest, *, max_group_size: int, size_multiple_px: int, can_publish: bool
) -> sampling.ResolvedSampling:
    """Check a request and resolve its sampling parameters. Raises `InvalidArgument` or `FailedPrecondition`."""
    if not request.prompt.strip():
        raise InvalidArgument("prompt is empty; say what to generate", field="prompt", reason="PROMPT_EMPTY")
    if len(request.prompt.encode()) > MAX_PROMPT_BYTES:
        raise InvalidArgument(f"prompt is longer than {MAX_PROMPT_BYTES} bytes; shorten it", field="prompt")
    if not 1 <= len(request.seeds) <= max_group_size:
        raise InvalidArgument(
            f"seeds has {len(request.seeds)} entries; a group of this worker has 1 to {max_group_size} "
            "(--max-group-size)",
            field="seeds",
            reason="GROUP_SIZE",
        )
    check_id(request.group_id, field="group_id")
    check_rewards(request.rewards)
    filters.check(request.filters, request.rewards)
    if publishes(request):
        _check_publishing(request, can_publish)
    return sampling.resolve(request.sampling, group_seed=request.seeds[0], size_multiple_px=size_multiple_px)


def publishes(request: GenerateGroupRequest) -> bool:
    """Whether the kept group goes to the stream."""
    return request.publish == PublishMode.PUBLISH_MODE_STREAM


def check_rewards(specs: Sequence[RewardSpec]) -> None:
    """Names are unique, weights finite, and a trained reward is never silently dropped."""
    seen: set[str] = set()
    for index, spec in enumerate(specs):
        field = f"rewards[{index}]"
        if not spec.name or spec.name in seen:
            raise InvalidArgument(
                f"{field}.name is {spec.name!r}; it must be given, once per reward", field=f"{field}.name"
            )
        seen.add(spec.name)
        if spec.HasField("weight") and not math.isfinite(spec.weight):
            raise InvalidArgument(f"{field}.weight is {spec.weight}; it must be finite", field=f"{field}.weight")
        dropped = spec.failure_policy == RewardFailurePolicy.REWARD_FAILURE_POLICY_DROP_REWARD
        if dropped and spec.role != RewardRole.REWARD_ROLE_MONITOR:
            raise InvalidArgument(
                f"{field}.failure_policy is DROP_REWARD, which a TRAIN reward cannot have: its advantage would be made "
                "up. Use RETRY, DROP_GROUP or FAIL_RUN, or make it a MONITOR reward",
                field=f"{field}.failure_policy",
            )


def check_freshness(wanted: WeightVersion, have: WeightVersion) -> None:
    """Raise `FailedPrecondition` when weights at least as new as `wanted` are asked for and `have` is not."""
    if satisfies(have, wanted):
        return
    raise FailedPrecondition(
        f"the weights here are of run {have.run_id!r} step {have.step}; the request needs run {wanted.run_id!r} "
        f"step {wanted.step} or newer. Wait for the weight update, or use another worker",
        field="min_weight_version",
        reason="WEIGHTS_TOO_OLD",
    )


def _check_publishing(request: GenerateGroupRequest, can_publish: bool) -> None:
    if not can_publish:
        raise FailedPrecondition(
            "publish is STREAM, but this worker was started without --redis and --blob-root",
            field="publish",
            reason="PUBLISH_NOT_CONFIGURED",
        )
    if not request.run_id:
        raise InvalidArgument("run_id is empty; it names the stream to publish to", field="run_id")
    check_id(request.run_id, field="run_id")
    if request.metadata.ByteSize() > MAX_ENTRY_BYTES // 4:
        raise InvalidArgument(
            f"metadata has {request.metadata.ByteSize()} bytes; a published group carries at most "
            f"{MAX_ENTRY_BYTES // 4}",
            field="metadata",
        )
