"""Start SGLang's worker in this process."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from headwater.diffusion.families import Family
from headwater.errors import FailedPrecondition
from headwater_rollout.engine.sglang import plugin, process

# The denoiser ("dit" here) always has fp32 weights, as in the trainer; autocast is the plugin's.
_DENOISER = {"dit": "fp32"}
_MODEL_ID = {"sd3": "stable-diffusion-3-medium"}  # by family; SGLang itself guesses it from the folder's name
_ENCODERS = dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"), "fp32")


def start_worker(model: str, family: Family, precision: str, device: torch.device) -> tuple[Any, Any]:
    """SGLang's worker with the pipeline in folder `model` loaded, and its ServerArgs.

    With `precision` "fp32" every part is fp32; with "bf16" the text encoders have SGLang's default precisions. Raises
    `FailedPrecondition` when SGLang did not load our plugin.
    """
    with process.contained(device):
        _load_sglang()
        from sglang.multimodal_gen.runtime.managers.cpu_worker import CPUWorker
        from sglang.multimodal_gen.runtime.managers.gpu_worker import GPUWorker
        from sglang.multimodal_gen.runtime.platforms import current_platform
        from sglang.multimodal_gen.runtime.server_args import PortArgs, ServerArgs, set_global_server_args

        arguments = ServerArgs.from_kwargs(
            model_path=model,
            model_id=_MODEL_ID.get(family.name),
            num_gpus=1,
            warmup_mode="off",
            log_level="warning",
            output_path=None,
            disable_autocast=True,
            component_precisions=_DENOISER | (_ENCODERS if precision == "fp32" else {}),
        )
        set_global_server_args(arguments)
        process.init_local_group(current_platform.get_torch_distributed_backend_str())
        worker_class = CPUWorker if current_platform.is_cpu() else GPUWorker
        worker = worker_class(
            local_rank=device.index or 0,
            rank=0,
            master_port=PortArgs.from_server_args(arguments).master_port,
            server_args=arguments,
        )
        _limit_text(arguments, family.text_tokens(model))
    return worker, arguments


def _limit_text(arguments: Any, token_counts: Sequence[int]) -> None:
    """Let the text encoders see as many tokens as the model's own tokenizers allow; SGLang has fixed numbers.

    Once the pipeline is loaded: loading sets T5's number again.
    """
    encoders = arguments.pipeline_config.text_encoder_configs
    for encoder, count in zip(encoders, token_counts, strict=True):
        encoder.arch_config.text_len = count
        encoder.arch_config.tokenizer_kwargs["max_length"] = count


def _load_sglang() -> None:
    """Import SGLang in the order it needs: platform, plugins, hooks. Raises `FailedPrecondition` without our hooks."""
    from sglang.multimodal_gen.runtime.platforms import initialize_current_platform

    initialize_current_platform()
    from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks, load_plugins

    load_plugins()
    apply_plugin_hooks()
    if not plugin.applied():
        raise FailedPrecondition(
            "SGLang did not apply Headwater's plugin. Install the headwater package (its entry point registers the "
            "plugin), add 'headwater' to SGLANG_PLUGINS if that is set (it is "
            f"{os.environ.get('SGLANG_PLUGINS', '')!r}), and use the sglang version that Headwater pins"
        )
