"""The plan of a weight update: which tensors travel, in which order, cut into which flat buffers."""

from collections.abc import Iterator, Sequence

import torch
import xxhash

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.common.v1.tensor_pb2 import TensorSpec
from headwater.errors import InvalidArgument
from headwater.rollout.v1.weights_pb2 import WeightBucket, WeightPlan, WeightTensor, WeightUpdateMode
from headwater.tensors import torch_codec

ALIGNMENT_BYTES = 16
DEFAULT_BUCKET_BYTES = 256 * 1024 * 1024

_WEIGHT_DTYPES = {value: dtype for value, dtype in torch_codec.TORCH_DTYPES.items() if dtype.is_floating_point}


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Dtype and shape of a weight. Raises `InvalidArgument` for a dtype that weights do not have."""
    if tensor.dtype not in _WEIGHT_DTYPES.values():
        raise InvalidArgument(f"weights of dtype {tensor.dtype} cannot be sent; cast to float32 or bfloat16")
    return torch_codec.spec_of(tensor)


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a spec. Raises `InvalidArgument` for one that weights do not have."""
    if spec.dtype not in _WEIGHT_DTYPES:
        raise InvalidArgument(f"dtype {spec.dtype} is not a weight dtype", field="plan.tensors.spec.dtype")
    return _WEIGHT_DTYPES[spec.dtype]


def build_plan(
    tensors: Sequence[tuple[str, TensorSpec]],
    *,
    epoch: int,
    version: WeightVersion,
    component: str,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> WeightPlan:
    """A FULL plan of (name, spec) in the given order. A tensor larger than `bucket_bytes` gets a bucket of its own."""
    plan = WeightPlan(
        epoch=epoch, version=version, component=component, mode=WeightUpdateMode.WEIGHT_UPDATE_MODE_FULL,
        tensors=[WeightTensor(name=name, spec=spec) for name, spec in tensors],
    )  # fmt: skip
    first, size = 0, 0
    for index, (_, spec) in enumerate(tensors):
        needed = _padded_bytes(spec)
        if size and size + needed > bucket_bytes:
            plan.buckets.append(WeightBucket(first_tensor=first, tensor_count=index - first, byte_size=size))
            first, size = index, 0
        size += needed
    if tensors:
        plan.buckets.append(WeightBucket(first_tensor=first, tensor_count=len(tensors) - first, byte_size=size))
    plan.digest = digest(plan)
    return plan


def check_plan(plan: WeightPlan) -> None:
    """Raise `InvalidArgument` unless names are unique, the buckets cover all tensors once and the digest is right."""
    names = [tensor.name for tensor in plan.tensors]
    if not names or len(set(names)) != len(names):
        raise InvalidArgument("plan.tensors is empty or names a tensor twice", field="plan.tensors")
    position = 0
    for bucket in plan.buckets:
        covered = plan.tensors[position : position + bucket.tensor_count]
        needed = sum(_padded_bytes(tensor.spec) for tensor in covered)
        if bucket.first_tensor != position or not covered or bucket.byte_size != needed:
            raise InvalidArgument(f"the bucket at tensor {position} does not fit its tensors", field="plan.buckets")
        position += bucket.tensor_count
    if position != len(names):
        raise InvalidArgument(f"the buckets cover {position} of {len(names)} tensors", field="plan.buckets")
    if plan.digest != digest(plan):
        raise InvalidArgument("plan.digest does not match the plan: the two ends disagree", field="plan.digest")


def digest(plan: WeightPlan) -> str:
    """xxh3_128 of the plan without its digest, 32 hex digits."""
    bare = WeightPlan()
    bare.CopyFrom(plan)
    bare.digest = ""
    return xxhash.xxh3_128_hexdigest(bare.SerializeToString(deterministic=True))


def bucket_views(plan: WeightPlan, index: int, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and view into `buffer` (uint8 [bucket.byte_size], any device) of each tensor of a bucket."""
    bucket, offset = plan.buckets[index], 0
    for tensor in plan.tensors[bucket.first_tensor : bucket.first_tensor + bucket.tensor_count]:
        flat = buffer[offset : offset + _item_count(tensor.spec) * torch_dtype(tensor.spec).itemsize]
        yield tensor.name, flat.view(torch_dtype(tensor.spec)).view(tuple(tensor.spec.shape))
        offset += _padded_bytes(tensor.spec)


def _item_count(spec: TensorSpec) -> int:
    count = 1
    for extent in spec.shape:
        if extent < 0:
            raise InvalidArgument(f"shape {list(spec.shape)} has a negative extent", field="plan.tensors.spec.shape")
        count *= extent
    return count


def _padded_bytes(spec: TensorSpec) -> int:
    size = _item_count(spec) * torch_dtype(spec).itemsize
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
