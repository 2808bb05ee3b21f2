"""A generated group and its scores -> one blob of tensors and one entry of the stream."""

import asyncio
import uuid

import torch

from headwater.common.v1.sample_pb2 import Conditioning, Media, ScoredGroup, Trajectory
from headwater.common.v1.tensor_pb2 import BlobRef, Tensor
from headwater.errors import Internal
from headwater.stream.publisher import ScoredPublisher
from headwater.tensors import codec, torch_codec
from headwater.tensors.blobs import BlobStore
from headwater_rollout.engine.base import GroupResult

CONDITIONING_ID = "prompt"
_INLINE_BYTES = 128  # a blob reference is about as long


class GroupPublisher:
    """Writes groups so that the trainer finds them: tensors first, then the entry that refers to them."""

    def __init__(self, blobs: BlobStore, stream: ScoredPublisher) -> None:
        self._blobs = blobs
        self.stream = stream

    async def publish(self, group: ScoredGroup, result: GroupResult) -> bool:
        """Publish a kept group whose samples carry their media inline. False when the group was there already.

        Raises `Unavailable` when blob store or Redis stay away, `Internal` when the engine's numbers are not finite.
        """
        check_finite(result)
        # Every attempt has a blob of its own: one that lost the race must not replace what the entry refers to.
        uri = f"{group.run_id}/groups/{group.group_id}-{uuid.uuid4().hex[:8]}.bin"
        entry = ScoredGroup()
        entry.CopyFrom(group)
        await asyncio.to_thread(self._store, uri, entry, result)
        published = await self.stream.publish(entry)
        if not published:  # after an error the entry may be there all the same: then the blob stays, for the sweep
            await asyncio.to_thread(self._blobs.delete, uri)
        return published

    def _store(self, uri: str, entry: ScoredGroup, result: GroupResult) -> None:
        """Fill in trajectories and conditioning, and write what they refer to."""
        blob = _BlobBuilder()
        _fill_conditioning(entry.conditionings.add(id=CONDITIONING_ID), result, blob)
        timesteps, sigmas = blob.tensor(result.timesteps), blob.tensor(result.sigmas)
        for index, sample in enumerate(entry.samples):
            blob.media(sample.media)
            sample.trajectory.CopyFrom(
                Trajectory(
                    latent_positions=result.latent_positions,
                    trained_steps=result.trained_steps,
                    conditioning_id=CONDITIONING_ID,
                )
            )
            trajectory = sample.trajectory
            blob.tensor_into(trajectory.latents, result.latents[index])
            blob.tensor_into(trajectory.log_probs, result.log_probs[index])
            blob.shared_into(trajectory.timesteps, timesteps)
            blob.shared_into(trajectory.sigmas, sigmas)
        blob.write(self._blobs, uri)


class _BlobBuilder:
    """Collects buffers and the messages that shall refer to them; `write` fills the references in."""

    def __init__(self) -> None:
        self._buffers: list[codec.Buffer] = []
        self._waiting: list[tuple[BlobRef, int]] = []

    def tensor(self, value: torch.Tensor) -> tuple[Tensor, int | None]:
        """A tensor that several messages share: its message, and its buffer when it does not travel inline."""
        data = torch_codec.to_buffer(value)
        if len(data) <= _INLINE_BYTES:
            return torch_codec.encode(value), None
        self._buffers.append(data)
        return Tensor(spec=torch_codec.spec_of(value)), len(self._buffers) - 1

    def shared_into(self, target: Tensor, shared: tuple[Tensor, int | None]) -> None:
        """Make `target` a copy of a shared tensor."""
        message, buffer = shared
        target.CopyFrom(message)
        if buffer is not None:
            self._waiting.append((target.blob, buffer))

    def tensor_into(self, target: Tensor, value: torch.Tensor) -> None:
        """Make `target` hold `value`."""
        self.shared_into(target, self.tensor(value))

    def media(self, media: Media) -> None:
        """Move inline media into the blob."""
        self._buffers.append(media.data)
        self._waiting.append((media.blob, len(self._buffers) - 1))

    def write(self, store: BlobStore, uri: str) -> None:
        """Write the blob and complete every reference."""
        refs = store.put(uri, self._buffers)
        for target, buffer in self._waiting:
            target.CopyFrom(refs[buffer])


def _fill_conditioning(conditioning: Conditioning, result: GroupResult, blob: _BlobBuilder) -> None:
    for tensors, into in ((result.positive, conditioning.positive), (result.negative, conditioning.negative)):
        for name, value in tensors.items():
            blob.tensor_into(into.add(name=name).tensor, value)


def check_finite(result: GroupResult) -> None:
    """Raise `Internal` when latents or log-probs hold NaN or infinity: such a group must never be trained on."""
    for name, value in (("latents", result.latents), ("log_probs", result.log_probs)):
        if not bool(torch.isfinite(value).all()):
            raise Internal(
                f"the engine made {name} that are not finite; lower the noise level, or use fp32", reason="NOT_FINITE"
            )
