"""Eager stand-ins for the two fused operators that SGLang's diffusion layers call on a CPU.

They come from a CPU build of sgl-kernel that is not on PyPI. Where that build is installed, nothing is done.
"""

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []  # the registrations live as long as these objects


def install() -> None:
    """Register the operators that are missing. Idempotent."""
    _register(
        "fused_norm_scale_shift_cpu",
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str kind, float eps) -> Tensor",
        norm_scale_shift,
    )
    _register(
        "fused_scale_residual_norm_scale_shift_cpu",
        "(Tensor residual, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str kind,"
        " float eps) -> (Tensor, Tensor)",
        scale_residual_norm_scale_shift,
    )


def norm_scale_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, kind: str, eps: float
) -> Tensor:
    """norm(x) * (1 + scale) + shift over the last dimension, computed in fp32, in x's dtype. `kind`: "layer" or rms."""
    return (_norm(x, weight, bias, kind, eps) * (1 + scale.float()) + shift.float()).to(x.dtype)


def scale_residual_norm_scale_shift(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`norm_scale_shift` of residual + x * gate, and that sum."""
    total = residual + (x if gate is None else x * gate)
    return norm_scale_shift(total, weight, bias, scale, shift, kind, eps).to(x.dtype), total


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    values = x.float()
    weight, bias = (None if part is None else part.float() for part in (weight, bias))
    if kind == "layer":
        return torch.nn.functional.layer_norm(values, (x.shape[-1],), weight, bias, eps)
    normalised = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return normalised if weight is None else normalised * weight


def _register(name: str, signature: str, function: object) -> None:
    if hasattr(torch.ops.sgl_kernel, name):
        return
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define(name + signature)
    library.impl(name, function, "CPU")
    _libraries.append(library)
