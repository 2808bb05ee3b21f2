"""Headwater's plugin for SGLang-diffusion (entry point group `sglang.multimodal_gen.plugins`).

It takes over the denoise transition of requests that carry a `Recorder`, and leaves every other request alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headwater_rollout.engine.recorder import Recorder
from headwater_rollout.engine.sglang import cpu_ops

# Key of the `Recorder` in `Req.extra`.
RECORDER = "headwater_recorder"
# Key in `Req.extra`: whether the denoiser runs under bf16 autocast.
AUTOCAST = "headwater_autocast"

_SGLANG = "sglang.multimodal_gen."
_POST_TRAINING = _SGLANG + "runtime.post_training."


def activate() -> None:
    """Called by SGLang in each of its processes, before it applies hooks."""
    from sglang.multimodal_gen.runtime.platforms import current_platform
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    if current_platform.is_cpu():
        cpu_ops.install()
    for target, hook in _hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)


def applied() -> bool:
    """Whether SGLang has found this plugin and applied every hook."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    return _hooks().keys() <= HookRegistry._patched


def _hooks() -> Mapping[str, Callable[..., Any]]:
    stages, configs = _SGLANG + "runtime.pipelines_core.stages.", _SGLANG + "configs.pipeline_configs."
    return {
        _POST_TRAINING + "flow_rollout_controller.FlowRolloutController.transition": transition,
        _POST_TRAINING + "rollout_hooks.init_rollout_env_if_enabled": keep_conditioning,
        stages + "denoising.DenoisingStage._predict_noise": predict_noise,
        configs + "stablediffusion3.StableDiffusion3PipelineConfig.expand_conditioning_to_sample_batch": expand,
        stages + "base.PipelineStage.progress_bar": progress_bar,
    }


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


def predict_noise(original: Callable[..., torch.Tensor], stage: Any, **named: Any) -> torch.Tensor:
    """Around `DenoisingStage._predict_noise`: the trainer's precision, and a model output in fp32.

    The trainer runs fp32 weights under autocast. SGLang's own mixed precision has bf16 weights and a bf16 residual
    stream, combines guidance in bf16 and rounds the latents with it: log-probabilities then differ by up to 2e-3.
    """
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    batch = get_forward_context().forward_batch
    if batch is None or RECORDER not in batch.extra:
        return original(stage, **named)
    device = named["latent_model_input"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=batch.extra.get(AUTOCAST, False)):
        return original(stage, **named).float()


def expand(original: Callable[..., Any], config: Any, batch: Any) -> Any:
    """Around SD3's `expand_conditioning_to_sample_batch`: one row of conditioning per sample, in fp32 as recorded.

    The stock SD3 leaves it at one row, which broadcasts, but through matrix products of another shape than the
    trainer's, and those round differently.
    """
    batch = original(config, batch)
    if RECORDER in batch.extra:
        for name in ("prompt_embeds", "pooled_embeds", "negative_prompt_embeds", "neg_pooled_embeds"):
            rows = getattr(batch, name)
            setattr(batch, name, [row.float().expand(batch.batch_size, *row.shape[1:]) for row in rows])
    return batch


def keep_conditioning(original: Callable[..., None], *, batch: Any, **named: Any) -> None:
    """Around `init_rollout_env_if_enabled`: keep what the denoiser is given, one row of it (all samples share it)."""
    original(batch=batch, **named)
    recorder: Recorder | None = batch.extra.get(RECORDER)
    if recorder is not None:
        recorder.positive = _first_rows(named["pos_cond_kwargs"])
        recorder.negative = _first_rows(named["neg_cond_kwargs"] or {})


def progress_bar(original: Callable[..., Any], stage: Any, *rest: Any, batch: Any = None, **named: Any) -> Any:
    """Around `PipelineStage.progress_bar`: none for our requests; they run in a service."""
    if batch is not None and RECORDER in batch.extra:
        named["disable"] = True
    return original(stage, *rest, batch=batch, **named)


def _first_rows(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value[0] for name, value in named.items() if isinstance(value, torch.Tensor)}
