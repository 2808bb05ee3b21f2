"""The `diffusers` engine: plain torch with the trainer's denoiser code, the numeric reference of the `sglang` one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import diffusers
import numpy as np
import torch
from torch import Tensor

from headwater.diffusion import families
from headwater.diffusion.schedules import schedule
from headwater.errors import FailedPrecondition, InvalidArgument
from headwater_rollout.engine.base import EngineInfo, GroupRequest, GroupResult
from headwater_rollout.engine.checks import check_component, check_request
from headwater_rollout.engine.recorder import Recorder


class DiffusersEngine:
    """A diffusers pipeline whose loop is ours. `precision` "bf16" is fp32 weights under autocast, as in the trainer."""

    def __init__(self, model: str | Path, precision: str = "fp32", device: str = "cpu") -> None:
        self._model = str(Path(model).resolve())
        self._family = families.resolve(self._model)
        self._device = torch.device(device)
        self._precision = precision
        if self._family.name != "sd3":
            raise InvalidArgument(
                f"the diffusers engine cannot encode prompts of {self._family.name}; use --engine sglang",
                field="engine",
            )
        denoiser = self._family.load_component(self._model, "transformer", torch.float32)
        self._pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(
            self._model, transformer=denoiser, torch_dtype=torch.float32
        ).to(self._device)
        self._released = False
        self.info = EngineInfo(
            engine="diffusers",
            engine_version=diffusers.__version__,
            model=str(model),
            family=self._family.name,
            components=self._family.components,
            size_multiple_px=self._family.size_multiple_px(self._model),
            device=str(self._device),
        )

    @torch.no_grad()
    def generate(self, request: GroupRequest) -> GroupResult:
        """Generate one group as one batch. Raises `InvalidArgument` for what the model cannot make."""
        check_request(request, self.info)
        if self._released:
            raise FailedPrecondition("the engine's memory is released; resume it before generating")
        sampling = request.sampling
        positive = self._encode(request.prompt)
        negative = self._encode(sampling.negative_prompt) if sampling.guidance_scale > 1 else {}
        recorder = Recorder(
            request,
            schedule(families.scheduler_config(self._model), sampling.steps, sampling.flow_shift),
            self._family.latent_shape(self._model, sampling.height_px, sampling.width_px),
            self._device,
        )
        latents = recorder.initial_latents()
        for step in range(sampling.steps):
            timestep = recorder.schedule.timesteps[step].to(self._device)
            velocity = self._velocity(latents, timestep, positive, negative, sampling.guidance_scale)
            latents = recorder.advance(step, latents, velocity)
        return GroupResult(
            media=self._decode(latents),
            latents=recorder.stacked_latents(),
            latent_positions=recorder.positions,
            timesteps=recorder.schedule.timesteps,
            sigmas=recorder.schedule.sigmas,
            trained_steps=sampling.stochastic_steps,
            log_probs=recorder.stacked_log_probs(),
            positive={name: tensor.cpu() for name, tensor in positive.items()},
            negative={name: tensor.cpu() for name, tensor in negative.items()},
            model_outputs=recorder.stacked_model_outputs(),
        )

    def weight_views(self, component: str) -> Mapping[str, Sequence[Tensor]]:
        """Live parameters of a component by diffusers name; see `Engine.weight_views`."""
        check_component(component, self.info)
        module = getattr(self._pipeline, component)
        return {name: (parameter.detach(),) for name, parameter in module.named_parameters()}

    def weights_changed(self) -> None:
        """Nothing is derived from the weights."""

    def release_memory(self) -> int:
        """Move the pipeline to host memory (CUDA only; on a CPU there is nothing to free)."""
        return -self._move("cpu", released=True)

    def resume_memory(self) -> int:
        """Bring it back."""
        return self._move(str(self._device), released=False)

    def close(self) -> None:
        """Free the model."""
        if hasattr(self, "_pipeline"):
            del self._pipeline
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _encode(self, prompt: str) -> dict[str, Tensor]:
        embeddings, _, pooled, _ = self._pipeline.encode_prompt(
            prompt, prompt, prompt, do_classifier_free_guidance=False,
            max_sequence_length=self._family.text_tokens(self._model)[-1],
        )  # fmt: skip
        return {"encoder_hidden_states": embeddings[0].float(), "pooled_projections": pooled[0].float()}

    def _velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor],
        scale: float,
    ) -> Tensor:
        outputs = []
        for named in (positive, negative) if negative else (positive,):
            batch = {name: tensor.expand(len(latents), *tensor.shape) for name, tensor in named.items()}
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
                outputs.append(
                    self._family.predict(self._pipeline.transformer, latents, timestep.repeat(len(latents)), batch)
                )
        return self._family.guided(outputs[0], outputs[1], scale) if negative else outputs[0]

    def _decode(self, latents: Tensor) -> np.ndarray:
        vae = self._pipeline.vae
        images = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        pixels = ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu()
        return pixels.permute(0, 2, 3, 1).unsqueeze(1).contiguous().numpy()

    def _move(self, device: str, *, released: bool) -> int:
        if self._device.type != "cuda" or self._released == released:
            return 0
        before = torch.cuda.memory_allocated(self._device)
        self._pipeline.to(device)
        torch.cuda.empty_cache()
        self._released = released
        return torch.cuda.memory_allocated(self._device) - before
