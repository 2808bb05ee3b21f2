"""Headwater's plugin for SGLang-diffusion (entry point group `sglang.multimodal_gen.plugins`).

It takes over the denoise transition of requests that carry a `Recorder`, and leaves every other request alone.
"""

from collections.abc import Callable
from typing import Any

import torch

from headwater_rollout.engine.recorder import Recorder
from headwater_rollout.engine.sglang import cpu_ops

# Key of the `Recorder` in `Req.extra`.
RECORDER = "headwater_recorder"

_CONTROLLER = "sglang.multimodal_gen.runtime.post_training.flow_rollout_controller.FlowRolloutController.transition"
_SCHEDULER = (
    "sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete"
    ".FlowMatchEulerDiscreteScheduler.step"
)
_PROGRESS = "sglang.multimodal_gen.runtime.pipelines_core.stages.base.PipelineStage.progress_bar"


def activate() -> None:
    """Called by SGLang in each of its processes, before it applies hooks."""
    from sglang.multimodal_gen.runtime.platforms import current_platform
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    if current_platform.is_cpu():
        cpu_ops.install()
    HookRegistry.register(_CONTROLLER, transition, HookType.AROUND)
    HookRegistry.register(_SCHEDULER, scheduler_step, HookType.AROUND)
    HookRegistry.register(_PROGRESS, progress_bar, HookType.AROUND)


def applied() -> bool:
    """Whether SGLang has found this plugin and applied every hook."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    return {_CONTROLLER, _SCHEDULER, _PROGRESS} <= HookRegistry._patched


def transition(original: Callable[..., torch.Tensor], controller: Any, *, batch: Any, **step: Any) -> torch.Tensor:
    """Around `FlowRolloutController.transition`: advance the latents with the request's own `Recorder`.

    The stock transition draws a sample's noise in the whole batch's shape, so that a sample depends on its batch, and
    takes log-probabilities from the noise rather than from the latents that are handed out.
    """
    recorder: Recorder | None = batch.extra.get(RECORDER)
    if recorder is None:
        return original(controller, batch=batch, **step)
    following = recorder.advance(step["step_index"], step["sample"], step["model_output"])
    # The controller stacks one entry per step when the loop ends; ours are in the recorder.
    zeros = following.new_zeros(len(following))
    controller.append_local_rollout_log_probs(zeros, zeros + 1)
    return following


def scheduler_step(
    original: Callable[..., Any], scheduler: Any, model_output: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    """Around `FlowMatchEulerDiscreteScheduler.step`: keep the latents of a rollout in fp32.

    The stock step rounds them to the dtype of the model output, which in bf16 moves the log-probability of a late step
    by more than the clip range.
    """
    if named.get("transition") is not None:
        model_output = model_output.float()
    return original(scheduler, model_output, *rest, **named)


def progress_bar(original: Callable[..., Any], stage: Any, *rest: Any, batch: Any = None, **named: Any) -> Any:
    """Around `PipelineStage.progress_bar`: none for our requests; they run in a service."""
    if batch is not None and RECORDER in batch.extra:
        named["disable"] = True
    return original(stage, *rest, batch=batch, **named)
