"""torch <-> `common.v1.Tensor`, bfloat16 included. Bytes are shared with the tensor wherever torch allows it."""

import torch

from headwater.common.v1.tensor_pb2 import DType, Tensor, TensorSpec
from headwater.errors import InvalidArgument
from headwater.tensors import codec

TORCH_DTYPES: "dict[DType.ValueType, torch.dtype]" = {
    DType.D_TYPE_FLOAT32: torch.float32,
    DType.D_TYPE_BFLOAT16: torch.bfloat16,
    DType.D_TYPE_FLOAT16: torch.float16,
    DType.D_TYPE_FLOAT64: torch.float64,
    DType.D_TYPE_INT32: torch.int32,
    DType.D_TYPE_INT64: torch.int64,
    DType.D_TYPE_UINT8: torch.uint8,
    DType.D_TYPE_BOOL: torch.bool,
}
_DTYPE_OF = {dtype: value for value, dtype in TORCH_DTYPES.items()}


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor. Raises `InvalidArgument` for a dtype that does not travel."""
    if tensor.dtype not in _DTYPE_OF:
        raise InvalidArgument(f"tensors of dtype {tensor.dtype} do not travel; convert to one of {list(_DTYPE_OF)}")
    return codec.make_spec(_DTYPE_OF[tensor.dtype], tensor.shape)


def to_buffer(tensor: torch.Tensor) -> memoryview:
    """The raw little-endian bytes; no copy for a contiguous CPU tensor. The view keeps the storage alive."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def from_buffer(spec: TensorSpec, data: codec.Buffer, *, field: str = "tensor") -> torch.Tensor:
    """A CPU tensor over `data`: shared when `data` is writable, else one copy. `DataLoss` when the length is wrong."""
    bits = codec.from_buffer(spec, data, field=field)
    if bits.size == 0:
        return torch.empty(tuple(spec.shape), dtype=TORCH_DTYPES[spec.dtype])
    if not bits.flags.writeable:
        bits = bits.copy()
    return torch.from_numpy(bits.reshape(-1).view("u1")).view(TORCH_DTYPES[spec.dtype]).reshape(tuple(spec.shape))


def encode(tensor: torch.Tensor) -> Tensor:
    """An inline `Tensor`, for at most 64 KiB; larger ones belong in the blob store."""
    return codec.inline(spec_of(tensor), to_buffer(tensor))


def decode(tensor: Tensor, fetch: codec.Fetch | None = None, *, field: str = "tensor") -> torch.Tensor:
    """The torch tensor of a `Tensor`, on the CPU. `fetch` (`BlobStore.get`) resolves blob references."""
    return from_buffer(tensor.spec, codec.tensor_bytes(tensor, fetch, field=field), field=field)
