"""The part of a denoise run that is the same in every engine: noise, transitions, and what is kept for the trainer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.diffusion.schedules import Schedule
from headwater.diffusion.transitions import grid_transition
from headwater_rollout.engine.base import GroupRequest
from headwater_rollout.engine.noise import SampleNoise


class Recorder:
    """Advances the latents of one group step by step and records its trajectory.

    n samples, T steps, W stochastic steps, K stored latents. Log-probabilities are computed on the fp32 latents that
    are stored, not on the noise that was drawn: the trainer, which sees only the former, gets the same numbers.
    """

    def __init__(
        self, request: GroupRequest, schedule: Schedule, latent_shape: tuple[int, ...], device: torch.device | str
    ) -> None:
        sampling = request.sampling
        self.schedule = schedule
        self.positions = (
            stored_positions(sampling.stochastic_steps, sampling.steps) if request.record_trajectory else ()
        )
        self.positive: Mapping[str, Tensor] = {}  # conditioning of one sample, filled in by the engine
        self.negative: Mapping[str, Tensor] = {}
        self.log_probs: list[Tensor] = []  # fp32 [n] per stochastic step
        self.model_outputs: list[Tensor] = []  # fp32 [n, ...] per stochastic step
        self._sampling = sampling
        self._keep_outputs = request.record_model_outputs
        self._noise = SampleNoise(request.seeds, latent_shape, device)
        self._latents: dict[int, Tensor] = {}
        self._sigmas = schedule.sigmas.to(device)

    def initial_latents(self) -> Tensor:
        """The first latents, fp32 [n, ...]. Call it once, before `advance`."""
        latents = self._noise.draw()
        self._store(0, latents)
        return latents

    def advance(self, step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        """The latents after `step` (0-based, in order), fp32 [n, ...], given those before it and the model output."""
        sampling = self._sampling
        stochastic = step in sampling.stochastic_steps
        transition = grid_transition(
            sampling.transition if stochastic else "ode",
            latents,
            velocity,
            sigmas=self._sigmas,
            step=step,
            noise_level=sampling.noise_level,
        )
        following = transition.mean
        if stochastic:
            following = transition.sample_next(self._noise.draw())
            self.log_probs.append(transition.log_prob(following))
            if self._keep_outputs:
                self.model_outputs.append(velocity.float())
        self._store(step + 1, following)
        return following

    def stacked_latents(self) -> Tensor:
        """The stored latents, fp32 [n, K, ...] on the CPU."""
        if not self.positions:
            return torch.zeros(0)
        return torch.stack([self._latents[position] for position in self.positions], dim=1).cpu()

    def stacked_log_probs(self) -> Tensor:
        """Log-probabilities, fp32 [n, W] on the CPU."""
        if not self.log_probs:
            return torch.zeros(self._noise.count, 0)
        return torch.stack(self.log_probs, dim=1).cpu()

    def stacked_model_outputs(self) -> Tensor | None:
        """Model outputs at the stochastic steps, fp32 [n, W, ...] on the CPU, when they were asked for."""
        return torch.stack(self.model_outputs, dim=1).cpu() if self.model_outputs else None

    def _store(self, position: int, latents: Tensor) -> None:
        if position in self.positions:
            self._latents[position] = latents.detach().clone()


def stored_positions(stochastic_steps: tuple[int, ...], total_steps: int) -> tuple[int, ...]:
    """Positions of the latents to keep: inputs and outputs of the stochastic steps, and the final latent."""
    around = {position for step in stochastic_steps for position in (step, step + 1)}
    return tuple(sorted(around | {total_steps}))
