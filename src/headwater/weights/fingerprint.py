"""Fingerprints of tensors, computed on the tensor's own device and equal on every device.

A tensor's bytes are read as signed 64-bit words w_0 … w_{N-1}, the last one padded with zeros. With
f(w) = w xor (w >> 32), so that no bit of an element stands alone at the top of a word, the fingerprint is

    byte count * M  +  sum over blocks b of (2 b + 1) * M * sum over j of f(w_{bB+j}) * mix(j)      (modulo 2^64)

where B is the block length, mix an odd hash of the position in a block, and M an odd constant. Integer addition is
associative, so neither the order of a parallel reduction nor the device changes it; a swapped, shifted, zeroed or
truncated element does.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

_BLOCK = 1 << 20  # words, 8 MiB: the temporaries stay small and, on a CPU, near its caches
_MULTIPLIER_1 = 0x9E3779B97F4A7C15 - (1 << 64)  # golden ratio, as a signed 64-bit number
_MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - (1 << 64)  # from splitmix64
_WORD_BYTES = 8


def fingerprint(parts: torch.Tensor | Sequence[torch.Tensor]) -> int:
    """Fingerprint of a tensor, or of the concatenation of `parts` in row-major order.

    Any shape, dtype and device. Returns an integer in [0, 2^64).
    """
    tensors = [parts] if isinstance(parts, torch.Tensor) else list(parts)
    flat = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    if any(part.numel() % (_WORD_BYTES * _BLOCK) for part in flat[:-1]):
        flat = [torch.cat(flat)]
    total = sum(part.numel() for part in flat) * _MULTIPLIER_1
    sums = [_block_sum(block) for part in flat for block in _blocks(part)]
    values = torch.stack(sums).tolist() if sums else []
    total += sum((2 * index + 1) * _MULTIPLIER_1 * value for index, value in enumerate(values))
    return total % (1 << 64)


def _blocks(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """int64 words of `data`, uint8 [n], in blocks; a rest of less than a word is padded."""
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()  # words must be aligned
    words = data[:whole].view(torch.int64)
    if whole < data.numel():
        rest = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - whole] = data[whole:]
        words = torch.cat([words, rest.view(torch.int64)])
    if words.numel():
        yield from words.split(_BLOCK)


def _block_sum(words: torch.Tensor) -> torch.Tensor:
    """Weighted sum over one block; int64 scalar that wraps."""
    return (words ^ (words >> 32)).mul_(_mix(words.device, _BLOCK)[: words.numel()]).sum()


@lru_cache(maxsize=16)
def _mix(device: torch.device, count: int) -> torch.Tensor:
    """Odd weights of the positions in a block, int64 [count]."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_MULTIPLIER_1)
    return mixed.bitwise_xor_(mixed >> 31).mul_(_MULTIPLIER_2).bitwise_or_(1)
