"""Pixels to encoded media."""

import io

import numpy as np
from PIL import Image

from headwater.common.v1.sample_pb2 import Media
from headwater.errors import InvalidArgument

MAX_ENCODED_BYTES = 6 * 1024 * 1024


def encode(frames_FHWC: np.ndarray) -> Media:
    """A PNG of uint8 [1, H, W, 3]; JPEG when the PNG would exceed 6 MiB. `InvalidArgument` for several frames."""
    frame_count, height, width, _ = frames_FHWC.shape
    if frame_count != 1:
        raise InvalidArgument(
            f"the engine made {frame_count} frames, and this worker encodes still images only",
            field="sampling.frame_count",
        )
    image = Image.fromarray(frames_FHWC[0])
    mime_type, data = "image/png", _save(image, format="PNG", compress_level=3)
    if len(data) > MAX_ENCODED_BYTES:
        mime_type, data = "image/jpeg", _save(image, format="JPEG", quality=95)
    if len(data) > MAX_ENCODED_BYTES:
        raise InvalidArgument(
            f"an image of {width}x{height} px takes {len(data)} bytes; at most {MAX_ENCODED_BYTES} travel. "
            "Ask for smaller images",
            field="sampling",
        )
    return Media(mime_type=mime_type, data=data, width_px=width, height_px=height, frame_count=1)


def _save(image: Image.Image, **options: str | int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)  # type: ignore[arg-type]
    return buffer.getvalue()
