"""Fingerprints of tensors, computed on the tensor's own device and equal on every device.

The fingerprint of elements with unsigned bit patterns u_0 … u_{N-1} is sum_i (u_i + 1) * mix(i) modulo 2^64, where mix
is an odd hash of the position. Integer addition is associative, so neither the order of a parallel reduction nor the
device changes it; a swapped, shifted, zeroed or truncated element does.
"""

from collections.abc import Sequence

import torch

_CHUNK = 1 << 22  # elements; bounds the int64 temporaries to a few hundred MB
_MULTIPLIER_1 = 0x9E3779B97F4A7C15 - (1 << 64)  # golden ratio, as a signed 64-bit number
_MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - (1 << 64)  # from splitmix64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: -1}


def fingerprint(parts: torch.Tensor | Sequence[torch.Tensor]) -> int:
    """Fingerprint of a tensor, or of the concatenation of `parts` in row-major order.

    Any shape and device; dtypes of 1, 2, 4 or 8 bytes. Returns an integer in [0, 2^64).
    """
    tensors = [parts] if isinstance(parts, torch.Tensor) else list(parts)
    total, position = 0, 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for chunk in flat.split(_CHUNK):
            total += int(_chunk_sum(chunk, position))
            position += chunk.numel()
    return total % (1 << 64)


def _chunk_sum(chunk: torch.Tensor, position: int) -> torch.Tensor:
    """Sum over one chunk whose first element has the given position; int64 scalar that wraps."""
    size = chunk.element_size()
    # `&` makes a new tensor also where `.to` does not (8-byte dtypes): nothing below may write into the input.
    bits = (chunk.contiguous().view(_BITS[size]).to(torch.int64) & _MASKS[size]).add_(1)
    index = torch.arange(position, position + chunk.numel(), dtype=torch.int64, device=chunk.device)
    mixed = index.add_(1).mul_(_MULTIPLIER_1)
    mixed = mixed.bitwise_xor_(mixed >> 31).mul_(_MULTIPLIER_2).bitwise_or_(1)
    return bits.mul_(mixed).sum()
