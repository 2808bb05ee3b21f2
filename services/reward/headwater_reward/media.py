"""Media of a request as pixels. Sizes are checked before anything is allocated."""

import io
import zlib

import numpy as np
from PIL import Image

from headwater.common.v1.sample_pb2 import Media
from headwater.common.v1.tensor_pb2 import BlobRef, DType, Tensor
from headwater.errors import FailedPrecondition, InvalidArgument
from headwater.tensors import codec
from headwater.tensors.blobs import BlobStore

MAX_ENCODED_BYTES = 6 * 1024 * 1024
MAX_SIDE_PX = 8192
MAX_PIXELS = 32 * 1024 * 1024  # all frames together: 96 MiB of RGB
IMAGE_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
TENSOR_TYPE = "application/x-tensor"


def decode(media: Media, *, field: str, blobs: BlobStore | None, accepts_video: bool) -> np.ndarray:
    """Pixels uint8 [F, H, W, 3], RGB; F = 1 for an image.

    `field` is the path of `media` in the request, for errors. Raises `InvalidArgument` for what is too large, broken or
    of a type that cannot be read, `FailedPrecondition` for a blob reference without a blob root, `DataLoss` for a blob
    that does not match its checksum.
    """
    if media.mime_type == TENSOR_TYPE:
        frames = _decode_tensor(media.tensor, field=f"{field}.tensor", blobs=blobs)
    elif media.mime_type in IMAGE_FORMATS:
        frames = _decode_image(_encoded(media, field, blobs), media.mime_type, field)[np.newaxis]
    else:
        known = ", ".join([*IMAGE_FORMATS, TENSOR_TYPE])
        raise _invalid(f"{field}.mime_type", f"is {media.mime_type!r}; this server reads {known}")
    if len(frames) > 1 and not accepts_video:
        raise _invalid(field, f"has {len(frames)} frames, but this reward scores images only")
    _check_declared_size(media, frames, field)
    return frames


def _encoded(media: Media, field: str, blobs: BlobStore | None) -> bytes | bytearray:
    content = media.WhichOneof("content")
    if content not in ("data", "blob"):
        raise _invalid(field, f"has no encoded content for {media.mime_type}; set data or blob")
    path, size = f"{field}.{content}", media.blob.byte_size if content == "blob" else len(media.data)
    if not 0 < size <= MAX_ENCODED_BYTES:
        raise _invalid(path, f"has {size} bytes; an encoded image has between 1 and {MAX_ENCODED_BYTES}")
    return media.data if content == "data" else _read_blob(media.blob, path, blobs)


def _read_blob(ref: BlobRef, field: str, blobs: BlobStore | None) -> bytes | bytearray:
    if blobs is None:
        raise FailedPrecondition(
            f"{field} refers to the blob store, but this server was started without --blob-root; "
            "send inline data or start it with the blob root of the run",
            field=field,
            reason="BLOB_ROOT_MISSING",
        )
    return blobs.get(ref)


def _decode_image(data: bytes | bytearray, mime_type: str, field: str) -> np.ndarray:
    try:
        # Reads the header only; the pixels are decoded by convert(), after the size was checked.
        with Image.open(io.BytesIO(data), formats=[IMAGE_FORMATS[mime_type]]) as image:
            _check_size(1, image.height, image.width, field)
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        raise _invalid(field, f"is not a readable {mime_type}: {error}") from None


def _decode_tensor(tensor: Tensor, *, field: str, blobs: BlobStore | None) -> np.ndarray:
    spec, shape = tensor.spec, tuple(tensor.spec.shape)
    if spec.dtype not in (DType.D_TYPE_UINT8, DType.D_TYPE_FLOAT32) or len(shape) != 4 or shape[3] != 3:
        raise _invalid(f"{field}.spec", f"has shape {list(shape)}; pixels are uint8 or fp32 [F, H, W, 3]")
    _check_size(*shape[:3], field)
    pixels = codec.decode(tensor, lambda ref: _read_blob(ref, f"{field}.blob", blobs), field=field)
    if pixels.dtype == np.uint8:
        return pixels
    if not np.isfinite(pixels).all():
        raise _invalid(field, "holds values that are not finite; pixels are in [0, 1]")
    return np.rint(pixels.clip(0.0, 1.0) * 255.0).astype(np.uint8)


def _check_size(frames: int, height: int, width: int, field: str) -> None:
    if min(frames, height, width) < 1 or max(height, width) > MAX_SIDE_PX or frames * height * width > MAX_PIXELS:
        raise _invalid(
            field,
            f"is {width}x{height} pixels with {frames} frame(s); accepted are 1 to {MAX_SIDE_PX} pixels a side "
            f"and at most {MAX_PIXELS} pixels in all",
        )


def _check_declared_size(media: Media, frames_FHWC: np.ndarray, field: str) -> None:
    actual = {"frame_count": frames_FHWC.shape[0], "height_px": frames_FHWC.shape[1], "width_px": frames_FHWC.shape[2]}
    for name, value in actual.items():
        declared = getattr(media, name)
        if declared and declared != value:
            raise _invalid(f"{field}.{name}", f"is {declared}, but the content has {value}")


def _invalid(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {what}", field=field, reason="MEDIA_INVALID")
