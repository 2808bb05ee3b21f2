"""The policy: a denoiser with LoRA or all weights trainable, sharded with FSDP2. Master weights are fp32."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from headwater.config.recipe import Recipe
from headwater.diffusion.decay import ema_decay, old_policy_decay
from headwater.diffusion.families import Family
from headwater_trainer.ema import Ema
from headwater_trainer.lora import adapters_off, add_lora, lora_layers, merged
from headwater_trainer.ranks import Ranks
from headwater_trainer.sharding import full, shard


class ModelInput(Protocol):
    """What a denoiser is given: B rows on its device."""

    @property
    def latent(self) -> Tensor:
        """fp32 [B, ...]"""
        ...

    @property
    def timestep(self) -> Tensor:
        """fp32 [B], in the model's convention."""
        ...

    @property
    def positive(self) -> Mapping[str, Tensor]:
        """Conditioning, [B, ...]."""
        ...

    @property
    def negative(self) -> Mapping[str, Tensor]:
        """That of the other branch of guidance; empty without."""
        ...


@dataclass
class Policy:
    """One trained component. All ranks call every method together."""

    family: Family
    component: str
    module: nn.Module
    reference_copy: nn.Module | None  # full fine-tune with a KL term only
    guidance_scale: float
    autocast: bool  # bf16 compute
    device: torch.device
    old: Ema | None = None  # the policy that rollout samples from, where an objective keeps it apart
    average: Ema | None = None  # the reference of the KL, where it is not the initial policy
    old_differs: bool = True  # from the trained policy; equal ones need one pass less

    def velocity(self, batch: "ModelInput") -> Tensor:
        """Velocity fp32 [B, ...] of the policy for the latents of a batch, guided when the rollout was."""
        return self._velocity(self.module, batch)

    @torch.no_grad()
    def reference_velocity(self, batch: "ModelInput") -> Tensor:
        """The same of the reference: the moving average, adapters off, or the frozen copy.

        To be taken before a pass with gradient: the average is swapped in place.
        """
        if self.average is not None:
            with self.average.applied():
                return self._velocity(self.module, batch)
        if self.reference_copy is not None:
            return self._velocity(self.reference_copy, batch)
        with adapters_off(self.module):
            return self._velocity(self.module, batch)

    def old_and_new_velocity(self, batch: "ModelInput") -> tuple[Tensor, Tensor]:
        """The same of the old policy, which the objective must keep, without gradient, and of the trained one."""
        assert self.old is not None, "this objective keeps no old policy"
        if not self.old_differs:
            new = self.velocity(batch)
            return new.detach(), new
        # First: weights are swapped in place, and the gradient of a pass made before could not be taken any more.
        with torch.no_grad(), self.old.applied():
            old = self._velocity(self.module, batch)
        return old, self.velocity(batch)

    def updated(self, updates: int) -> None:
        """To be called after each optimizer update, of which there were `updates`."""
        self.old_differs = True
        if self.average is not None:
            self.average.update(updates)

    def update_old(self, updates: int) -> None:
        """Let the old policy, if there is one, follow the trained one after `updates` optimizer updates."""
        if self.old is not None:
            self.old_differs = self.old.update(updates) > 0

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; sharded."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the trainable parameters, and averages of them under names of their own."""
        averages = [each.tensors() for each in (self.old, self.average) if each is not None]
        return {**self.trainable(), **{name: tensor for each in averages for name, tensor in each.items()}}

    @torch.no_grad()
    def changed_weights(self) -> dict[str, Tensor]:
        """Full values, under their diffusers names, of all weights that training changes; a copy, for the workers.

        They are those of the old policy where there is one. With LoRA they are the adapted layers with the adapter
        merged in: W + alpha / rank * B @ A.
        """
        with self.old.applied() if self.old is not None else nullcontext():
            layers = lora_layers(self.module)
            if not layers:
                return {name: full(parameter) for name, parameter in self.trainable().items()}
            return {f"{name}.weight": merged(layer) for name, layer in layers.items()}

    @torch.no_grad()
    def all_weights(self) -> dict[str, Tensor]:
        """The same of every weight of the component."""
        plain = {
            name.replace(".base_layer.", "."): full(parameter)
            for name, parameter in self.module.named_parameters()
            if ".lora_A." not in name and ".lora_B." not in name
        }
        return {**plain, **self.changed_weights()}

    def _velocity(self, module: nn.Module, batch: "ModelInput") -> Tensor:
        precision = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with precision:
            positive = self.family.predict(module, batch.latent, batch.timestep, batch.positive)
            if self.guidance_scale == 1 or not batch.negative:
                return positive
            negative = self.family.predict(module, batch.latent, batch.timestep, batch.negative)
        return self.family.guided(positive, negative, self.guidance_scale)


def load_policy(recipe: Recipe, family: Family, ranks: Ranks) -> Policy:
    """Load, adapt, checkpoint, shard: in this order, on every rank. Holds no collective.

    Raises `InvalidArgument` for LoRA targets that bind nothing.
    """
    component = family.components[0]
    module = family.load_component(recipe.model.path, component, torch.float32)
    reference = None
    if recipe.lora is not None:
        module = add_lora(module, recipe.lora, family, seed=recipe.run.seed)
    else:
        module.requires_grad_(True)
        reference = copy.deepcopy(module).requires_grad_(False) if recipe.objective.needs_initial_policy else None
    if recipe.train.gradient_checkpointing:
        module.enable_gradient_checkpointing()
    for part in (module, reference):
        if part is not None:
            shard(part, family, ranks)
    policy = Policy(
        family=family,
        component=component,
        module=module,
        reference_copy=reference,
        guidance_scale=recipe.sampling.guidance_scale,
        autocast=recipe.model.precision == "bf16",
        device=ranks.device,
    )
    if recipe.objective.keeps_old_policy:
        policy.old = Ema(policy.trainable(), partial(old_policy_decay, recipe.objective.old_decay), "old")
    if recipe.objective.kl_reference == "ema" and recipe.ema is not None:
        policy.average = Ema(policy.trainable(), partial(ema_decay, max_decay=recipe.ema.max_decay))
    return policy
