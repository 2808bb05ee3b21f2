"""numpy <-> `common.v1.Tensor`: raw row-major little-endian bytes, checked before anything is allocated."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headwater.common.v1.tensor_pb2 import BlobRef, DType, Tensor, TensorSpec
from headwater.errors import DataLoss, InvalidArgument

MAX_INLINE_BYTES = 64 * 1024
MAX_TENSOR_BYTES = 2 * 1024**3
MAX_DIMS = 8

Buffer = bytes | bytearray | memoryview
Fetch = Callable[[BlobRef], Buffer]

# numpy has no bfloat16: such tensors appear as their bit patterns, uint16.
NUMPY_DTYPES: "dict[DType.ValueType, np.dtype]" = {
    DType.D_TYPE_FLOAT32: np.dtype("<f4"),
    DType.D_TYPE_BFLOAT16: np.dtype("<u2"),
    DType.D_TYPE_FLOAT16: np.dtype("<f2"),
    DType.D_TYPE_FLOAT64: np.dtype("<f8"),
    DType.D_TYPE_INT32: np.dtype("<i4"),
    DType.D_TYPE_INT64: np.dtype("<i8"),
    DType.D_TYPE_UINT8: np.dtype("u1"),
    DType.D_TYPE_BOOL: np.dtype("?"),
}
_DTYPE_OF = {dtype: value for value, dtype in NUMPY_DTYPES.items() if value != DType.D_TYPE_BFLOAT16}


def make_spec(dtype: "DType.ValueType", shape: Iterable[int]) -> TensorSpec:
    """A `TensorSpec` of an element type and a shape."""
    return TensorSpec(dtype=dtype, shape=list(shape))


def byte_size(spec: TensorSpec, *, field: str = "tensor", limit_bytes: int = MAX_TENSOR_BYTES) -> int:
    """Bytes that a tensor of this spec has. `InvalidArgument` for a bad dtype or shape, or more than the limit."""
    if spec.dtype not in NUMPY_DTYPES:
        raise InvalidArgument(
            f"{field}.spec.dtype is {spec.dtype}; use one of DType's values other than D_TYPE_UNSPECIFIED",
            field=f"{field}.spec.dtype",
        )
    shape = tuple(spec.shape)
    if len(shape) > MAX_DIMS or any(extent < 0 for extent in shape):
        raise InvalidArgument(
            f"{field}.spec.shape is {shape}; it must have at most {MAX_DIMS} extents, none negative",
            field=f"{field}.spec.shape",
        )
    size = math.prod(shape) * NUMPY_DTYPES[spec.dtype].itemsize
    if size > limit_bytes:
        raise InvalidArgument(
            f"{field} of shape {shape} has {size} bytes; at most {limit_bytes} are accepted",
            field=f"{field}.spec.shape",
        )
    return size


def spec_of(array: np.ndarray, dtype: "DType.ValueType | None" = None) -> TensorSpec:
    """The spec of an array; give `dtype` for bfloat16 bit patterns held as uint16."""
    if dtype is None:
        dtype = _DTYPE_OF.get(array.dtype.newbyteorder("<"))
        if dtype is None:
            raise InvalidArgument(f"arrays of dtype {array.dtype} do not travel; convert to one of {_names()}")
    elif array.dtype.newbyteorder("<") != NUMPY_DTYPES[dtype]:
        raise InvalidArgument(f"{DType.Name(dtype)} is passed as numpy {NUMPY_DTYPES[dtype]}, not as {array.dtype}")
    return make_spec(dtype, array.shape)


def to_buffer(array: np.ndarray) -> memoryview:
    """The raw bytes of an array; no copy when it is contiguous and little-endian already."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return memoryview(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)


def from_buffer(spec: TensorSpec, data: Buffer, *, field: str = "tensor") -> np.ndarray:
    """An array over `data`, without a copy. Raises `DataLoss` when the length does not fit the spec."""
    expected = byte_size(spec, field=field)
    if len(data) != expected:
        raise DataLoss(
            f"{field} has {len(data)} bytes, but shape {tuple(spec.shape)} needs {expected}",
            field=field,
            reason="TENSOR_LENGTH",
        )
    return np.frombuffer(data, dtype=NUMPY_DTYPES[spec.dtype]).reshape(tuple(spec.shape))


def encode(array: np.ndarray, dtype: "DType.ValueType | None" = None) -> Tensor:
    """An inline `Tensor`, for at most 64 KiB; larger ones belong in the blob store."""
    return inline(spec_of(array, dtype), to_buffer(array))


def inline(spec: TensorSpec, data: Buffer) -> Tensor:
    """An inline `Tensor` of bytes that fit `spec`."""
    if len(data) > MAX_INLINE_BYTES:
        raise InvalidArgument(
            f"a tensor of {len(data)} bytes does not travel inline (at most {MAX_INLINE_BYTES}); use the blob store"
        )
    return Tensor(spec=spec, inline=bytes(data))


def tensor_bytes(tensor: Tensor, fetch: Fetch | None = None, *, field: str = "tensor") -> Buffer:
    """The bytes of a `Tensor`, inline or fetched; the length is checked against the spec before the fetch."""
    size = byte_size(tensor.spec, field=field)
    kind = tensor.WhichOneof("data")
    if kind == "inline":
        data: Buffer = tensor.inline
    elif kind == "blob":
        if tensor.blob.byte_size != size:
            raise DataLoss(
                f"{field}.blob has {tensor.blob.byte_size} bytes, but shape {tuple(tensor.spec.shape)} needs {size}",
                field=f"{field}.blob.byte_size",
                reason="TENSOR_LENGTH",
            )
        if fetch is None:
            raise InvalidArgument(f"{field} is a blob reference; inline bytes are expected here", field=field)
        data = fetch(tensor.blob)
    else:
        raise InvalidArgument(f"{field} carries no data; set inline or blob", field=field)
    return data


def decode(tensor: Tensor, fetch: Fetch | None = None, *, field: str = "tensor") -> np.ndarray:
    """The array of a `Tensor` (bfloat16 as uint16 bit patterns). `fetch` resolves blob references."""
    return from_buffer(tensor.spec, tensor_bytes(tensor, fetch, field=field), field=field)


def _names() -> Sequence[str]:
    return [DType.Name(value).removeprefix("D_TYPE_").lower() for value in NUMPY_DTYPES]
