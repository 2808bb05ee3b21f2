"""Which live tensors of an engine a weight plan means, and whether they fit."""

from collections.abc import Sequence

import torch

from headwater.common.v1.tensor_pb2 import TensorSpec
from headwater.errors import InvalidArgument
from headwater.rollout.v1.weights_pb2 import WeightPlan, WeightUpdateMode
from headwater.weights.plan import spec_of, torch_dtype
from headwater_rollout.engine.base import Engine

Views = Sequence[torch.Tensor]  # consecutive along dimension 0: one tensor of the diffusers layout


def bind(engine: Engine, plan: WeightPlan) -> list[Views]:
    """The live views of every tensor of the plan. Raises `InvalidArgument` naming each one that does not fit."""
    if plan.mode != WeightUpdateMode.WEIGHT_UPDATE_MODE_FULL:
        raise InvalidArgument(
            "this worker takes WEIGHT_UPDATE_MODE_FULL; send LoRA merged, as values of the layers it changes",
            field="plan.mode",
        )
    views = engine.weight_views(plan.component)
    misfits = []
    for tensor in plan.tensors:
        if tensor.name not in views:
            misfits.append(f"{tensor.name} binds nothing")
        elif (live := spec_of_views(views[tensor.name])) != tensor.spec:
            misfits.append(f"{tensor.name} is {_describe(tensor.spec)} in the plan and {_describe(live)} here")
    if misfits:
        shown = "; ".join(misfits[:5])
        raise InvalidArgument(
            f"{len(misfits)} of {len(plan.tensors)} tensors do not fit {plan.component}: {shown}",
            field="plan.tensors",
            reason="WEIGHTS_DO_NOT_BIND",
        )
    return [views[tensor.name] for tensor in plan.tensors]


def copy_into(views: Views, value: torch.Tensor) -> None:
    """Write `value` into its live views."""
    parts = [value] if len(views) == 1 else value.split([view.shape[0] for view in views])
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)


def spec_of_views(views: Views) -> TensorSpec:
    """Dtype and shape of the tensor that the views hold together."""
    spec = spec_of(views[0])
    if len(views) > 1:
        spec.shape[0] = sum(view.shape[0] for view in views)
    return spec


def _describe(spec: TensorSpec) -> str:
    return f"{str(torch_dtype(spec)).removeprefix('torch.')}{list(spec.shape)}"
