"""The `sglang` engine: SGLang-diffusion's worker in this process, extended by `plugin`.

In process there is no HTTP and no pickle between us and the denoiser, and tensors stay on the device. SGLang keeps
global state, so a process holds one engine at a time.
"""

import copy
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.diffusion import families
from headwater.diffusion.schedules import schedule
from headwater.errors import FailedPrecondition, Internal
from headwater_rollout.engine.base import EngineInfo, GroupRequest, GroupResult
from headwater_rollout.engine.checks import check_component, check_request
from headwater_rollout.engine.recorder import Recorder
from headwater_rollout.engine.sglang import plugin
from headwater_rollout.engine.sglang.weights import live_views
from headwater_rollout.engine.sglang.worker import start_worker


class SglangEngine:
    """One SGLang worker. `precision` "bf16" runs the fp32 denoiser under autocast, as the trainer does."""

    _open: "SglangEngine | None" = None

    def __init__(self, model: str | Path, precision: str = "fp32", device: str = "cpu") -> None:
        if SglangEngine._open is not None:
            raise FailedPrecondition("this process has an sglang engine already; close it, or start another process")
        self._model = str(Path(model).resolve())
        self._family = families.resolve(self._model)
        self._device = torch.device(device)
        self._autocast = precision == "bf16"
        self._worker, self._server_args = start_worker(self._model, self._family, precision, self._device)
        self.info = EngineInfo(
            engine="sglang",
            engine_version=importlib.metadata.version("sglang"),
            model=str(model),
            family=self._family.name,
            components=self._family.components,
            size_multiple_px=self._family.size_multiple_px(self._model),
            device=str(self._device),
        )
        SglangEngine._open = self

    def generate(self, request: GroupRequest) -> GroupResult:
        """Generate one group as one batch. Raises `InvalidArgument` for what the model cannot make."""
        check_request(request, self.info)
        sampling = request.sampling
        recorder = Recorder(
            request,
            schedule(families.scheduler_config(self._model), sampling.steps, sampling.flow_shift),
            self._family.latent_shape(self._model, sampling.height_px, sampling.width_px),
            self._device,
        )
        output = self._worker.execute_forward([self._request(request, recorder)])
        if output.error is not None:
            raise Internal(f"SGLang could not generate the group: {output.error}", reason="ENGINE_FAILED")
        return GroupResult(
            media=_to_pixels(output.output),
            latents=recorder.stacked_latents(),
            latent_positions=recorder.positions,
            timesteps=recorder.schedule.timesteps,
            sigmas=recorder.schedule.sigmas,
            trained_steps=sampling.stochastic_steps,
            log_probs=recorder.stacked_log_probs(),
            positive=self._conditioning(recorder.positive),
            negative=self._conditioning(recorder.negative),
            model_outputs=recorder.stacked_model_outputs(),
        )

    def weight_views(self, component: str) -> Mapping[str, Sequence[Tensor]]:
        """Live parameters of a component by diffusers name; see `Engine.weight_views`."""
        check_component(component, self.info)
        return live_views(self._worker.pipeline.get_module(component), Path(self._model) / component)

    def weights_changed(self) -> None:
        """Drop captured CUDA graphs; nothing else is derived from the denoiser's weights."""
        if self._device.type == "cuda":
            self._worker._drop_breakable_cuda_graphs("weights changed")

    def release_memory(self) -> int:
        """Move all weights to pinned host memory (CUDA only; on a CPU there is nothing to free)."""
        return -self._occupy("release_memory_occupation")

    def resume_memory(self) -> int:
        """Bring them back."""
        return self._occupy("resume_memory_occupation")

    def close(self) -> None:
        """Free the model. The process group of one rank stays: SGLang's next worker uses it again."""
        if SglangEngine._open is self:
            SglangEngine._open = None
            self._worker = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _request(self, request: GroupRequest, recorder: Recorder) -> Any:
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.entrypoints.utils import prepare_request

        sampling = request.sampling
        parameters = SamplingParams.from_user_sampling_params_args(
            self._model,
            server_args=self._server_args,
            prompt=request.prompt,
            negative_prompt=sampling.negative_prompt,
            width=sampling.width_px,
            height=sampling.height_px,
            num_frames=sampling.frame_count,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance_scale,
            num_outputs_per_prompt=len(request.seeds),
            seed=list(request.seeds),
            generator_device="cpu",
            rollout=True,
            save_output=False,
            return_file_paths_only=False,
            suppress_logs=True,
        )
        made = prepare_request(server_args=self._server_args, sampling_params=parameters)
        made.extra |= {plugin.RECORDER: recorder, plugin.AUTOCAST: self._autocast}
        made.latents = recorder.initial_latents()
        made.scheduler = self._scheduler(recorder)
        made.timesteps = made.scheduler.timesteps
        return made

    def _scheduler(self, recorder: Recorder) -> Any:
        """A scheduler of SGLang's for this request alone, on exactly the recorder's grid."""
        scheduler = copy.deepcopy(self._worker.pipeline.get_module("scheduler"))
        scheduler.set_timesteps(len(recorder.schedule.sigmas) - 1, device=self._device)
        scheduler.sigmas = recorder.schedule.sigmas.to(self._device)
        scheduler.timesteps = recorder.schedule.timesteps[:-1].to(self._device)
        return scheduler

    def _conditioning(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The conditioning that the trainer needs, in fp32 on the CPU.

        SGLang makes inference tensors, which autograd refuses; copies made here are ordinary ones.
        """
        known = (name for name in self._family.conditioning_names if name in named)
        return {name: named[name].float().cpu().clone() for name in known}

    def _occupy(self, call: str) -> int:
        if self._device.type != "cuda":
            return 0
        before = torch.cuda.memory_allocated(self._device)
        answer = getattr(self._worker._get_memory_occupation(), call)()
        if not answer["success"]:
            raise Internal(f"SGLang's {call} failed: {answer['message']}", reason="ENGINE_FAILED")
        return torch.cuda.memory_allocated(self._device) - before


def _to_pixels(output: Tensor | np.ndarray) -> np.ndarray:
    """uint8 [n, F, H, W, 3] of SGLang's output in [0, 1], [n, 3, H, W] or [n, 3, F, H, W]."""
    pixels = torch.as_tensor(output).float().cpu()
    if pixels.ndim == 4:
        pixels = pixels.unsqueeze(2)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous().numpy()
