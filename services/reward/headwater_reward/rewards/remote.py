"""`remote`: a reward of another RewardService, under this server's name, queue and limits.

Images are sent on as PNG, so the score is that of the original; videos are not. TLS and token are of this process.
"""

import io
import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict
from PIL import Image
from pydantic import Field, create_model

from headwater.common.v1.reward_pb2 import RewardScore
from headwater.errors import FailedPrecondition, HeadwaterError, Internal, from_item_error
from headwater.reward.v1 import reward_pb2 as pb
from headwater.reward.v1.reward_pb2_grpc import RewardServiceStub
from headwater.rpc.channel import sync_channel
from headwater.rpc.errors import from_rpc_error
from headwater_reward.registry import GoldenImage, RewardOptions, RewardParams, Score, ScoreItem

MAX_CALL_BYTES = 7 * 1024 * 1024  # a message has at most 8 MiB


class RemoteOptions(RewardOptions):
    """Options of `remote`."""

    address: str = Field(description="give host:port, or dns:///name:port, of the other reward server")
    reward: str = Field(description="give the name of the reward at the other server")
    timeout_s: float = Field(60.0, gt=0, le=3600)  # of one call, unless the caller's deadline comes first


class RemoteReward:
    """Another server's reward. What it says about itself is asked for when it is loaded."""

    by_default: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ()
    options_model: ClassVar[type[RewardOptions]] = RemoteOptions

    def __init__(self, name: str, options: RemoteOptions) -> None:
        self.name, self._options = name, options
        self.description = f"The reward {options.reward} of the server {options.address}."
        self.minimum: float | None = None
        self.maximum: float | None = None
        self.accepts_video = self.group_wise = False
        self.params_model: type[RewardParams] = RewardParams

    def load(self, threads: int) -> None:
        """Connect. Raises `Unavailable` when there is no answer, `FailedPrecondition` when the reward is not there."""
        self._stub = RewardServiceStub(sync_channel(self._options.address))
        hosted = {info.name: info for info in self._list().rewards}
        if self._options.reward not in hosted:
            raise FailedPrecondition(
                f"{self.name}: {self._options.address} hosts no reward {self._options.reward!r}, but "
                f"{', '.join(sorted(hosted)) or 'none'}",
                reason="REWARD_CONFIG_INVALID",
            )
        info = hosted[self._options.reward]
        if info.group_wise:
            raise FailedPrecondition(
                f"{self.name}: {self._options.reward} is group-wise, which cannot be asked for in parts; name its "
                "server in --reward of the rollout workers instead",
                reason="REWARD_CONFIG_INVALID",
            )
        self.description = info.description
        self.minimum = info.minimum if info.HasField("minimum") else None
        self.maximum = info.maximum if info.HasField("maximum") else None
        fields: dict[str, Any] = {key: (Any, value) for key, value in MessageToDict(info.default_params).items()}
        self.params_model = create_model("RemoteParams", __base__=RewardParams, **fields)

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """One call for all samples of a prompt, or several when they are large."""
        results: list[Score | HeadwaterError] = [Internal("not scored")] * len(batch)
        calls: dict[str, list[int]] = {}
        for i, item in enumerate(batch):
            same = json.dumps([item.prompt, item.metadata, item.params.model_dump()])
            calls.setdefault(same, []).append(i)
        images = [_png(item.frames_FHWC[0]) for item in batch]
        for indices in calls.values():
            for part in _parts(indices, images):
                told = self._ask([batch[i] for i in part], [images[i] for i in part])
                for i, result in zip(part, told, strict=True):
                    results[i] = result
        return results

    def check(self, timeout_s: float) -> pb.RewardCheck:
        """The other server's golden images, scored there."""
        request = pb.CheckRewardsRequest(names=[self._options.reward])
        try:
            (check,) = self._stub.CheckRewards(request, timeout=min(timeout_s, self._options.timeout_s)).checks
        except grpc.RpcError as error:
            return pb.RewardCheck(name=self.name, passed=False, detail=from_rpc_error(error).message)
        check.name = self.name
        return check

    def golden_images(self) -> list[GoldenImage]:
        """None of its own: see `check`."""
        return []

    def _list(self) -> pb.ListRewardsResponse:
        try:
            return self._stub.ListRewards(pb.ListRewardsRequest(), timeout=self._options.timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def _ask(self, items: Sequence[ScoreItem], images: Sequence[bytes]) -> list[Score | HeadwaterError]:
        first = items[0]
        request = pb.ScoreGroupRequest(prompt=first.prompt)
        request.metadata.update(first.metadata)
        request.rewards.add(name=self._options.reward).params.update(first.params.model_dump())
        for image in images:
            request.media.add(mime_type="image/png", data=image)
        timeout_s = min(self._options.timeout_s, first.deadline - time.monotonic())
        try:
            response = self._stub.ScoreGroup(request, timeout=max(0.01, timeout_s))
        except grpc.RpcError as error:
            return [from_rpc_error(error)] * len(items)
        if len(response.samples) != len(items) or any(len(sample.scores) != 1 for sample in response.samples):
            return [Internal(f"{self.name}: {self._options.address} answered with other samples")] * len(items)
        return [_read(sample.scores[0]) for sample in response.samples]


def _read(score: RewardScore) -> Score | HeadwaterError:
    if score.WhichOneof("outcome") != "value":
        return from_item_error(score.error)
    return Score(score.value, dict(score.details))


def _png(image_HWC: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image_HWC).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _parts(indices: Sequence[int], images: Sequence[bytes]) -> list[list[int]]:
    """The indices in order, cut so that each part fits a message."""
    parts: list[list[int]] = []
    size = 0
    for i in indices:
        size += len(images[i])
        if not parts or size > MAX_CALL_BYTES:
            parts.append([])
            size = len(images[i])
        parts[-1].append(i)
    return parts
