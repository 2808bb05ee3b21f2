"""The policy: a denoiser with LoRA or all weights trainable, sharded with FSDP2. Master weights are fp32."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headwater.config.recipe import LoraSection, Recipe
from headwater.errors import InvalidArgument
from headwater_trainer.ranks import Ranks

# isort: off
from headwater.diffusion.families import Family  # before peft, which imports torchvision: see torchvision_ops
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
# isort: on

ADAPTER = "default"


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

    def velocity(self, batch: "ModelInput") -> Tensor:
        """Velocity fp32 [B, ...] of the policy for the latents of a batch, guided when the rollout was."""
        return self._velocity(self.module, batch)

    @torch.no_grad()
    def reference_velocity(self, batch: "ModelInput") -> Tensor:
        """The same of the reference: adapters off, or the frozen copy."""
        if self.reference_copy is not None:
            return self._velocity(self.reference_copy, batch)
        with _adapters_off(self.module):
            return self._velocity(self.module, batch)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; sharded."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    @torch.no_grad()
    def changed_weights(self) -> dict[str, Tensor]:
        """Full values, under their diffusers names, of all weights that training changes; a copy.

        With LoRA these are the adapted layers with the adapter merged in: W + alpha / rank * B @ A.
        """
        layers = _lora_layers(self.module)
        if not layers:
            return {name: _full(parameter) for name, parameter in self.trainable().items()}
        return {f"{name}.weight": _merged(layer) for name, layer in layers.items()}

    @torch.no_grad()
    def all_weights(self) -> dict[str, Tensor]:
        """Full values of every weight of the component under its diffusers name, adapters merged in; a copy."""
        plain = {
            name.replace(".base_layer.", "."): _full(parameter)
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
        reference = copy.deepcopy(module).requires_grad_(False) if recipe.objective.kl_coef > 0 else None
    if recipe.train.gradient_checkpointing:
        module.enable_gradient_checkpointing()
    for part in (module, reference):
        if part is not None:
            shard(part, family, ranks)
    return Policy(
        family=family,
        component=component,
        module=module,
        reference_copy=reference,
        guidance_scale=recipe.sampling.guidance_scale,
        autocast=recipe.model.precision == "bf16",
        device=ranks.device,
    )


def add_lora(module: nn.Module, section: LoraSection, family: Family, *, seed: int) -> nn.Module:
    """Freeze `module` and add trainable adapters; equal on all ranks. Raises `InvalidArgument` for a useless target."""
    module.requires_grad_(False)
    targets = list(section.targets or family.lora_targets)
    names = [name for name, _ in module.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            linear = sorted({n.rsplit(".", 1)[-1] for n, m in module.named_modules() if isinstance(m, nn.Linear)})
            raise InvalidArgument(
                f"lora.targets: {target!r} matches no layer of {family.name}; linear layers end in {', '.join(linear)}",
                field="lora.targets",
                reason="LORA_BINDS_NOTHING",
            )
    config = LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    for name, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer) and not isinstance(layer, LoraLinear):
            raise InvalidArgument(
                f"lora.targets: {name} is not a linear layer, and only those can be sent to the workers merged",
                field="lora.targets",
            )
    return module


def shard(module: nn.Module, family: Family, ranks: Ranks) -> None:
    """Shard each block, then what is left, over all ranks; one rank keeps everything as it is, which is faster."""
    module.to(ranks.device)
    if ranks.world_size == 1:
        return
    for block in family.blocks(module):
        fully_shard(block, mesh=ranks.mesh)
    fully_shard(module, mesh=ranks.mesh)


@contextmanager
def _adapters_off(module: nn.Module) -> Iterator[None]:
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters(False) would also freeze the parameters
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _lora_layers(module: nn.Module) -> Mapping[str, LoraLinear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def _merged(layer: LoraLinear) -> Tensor:
    base = _full(layer.base_layer.weight)
    down, up = _full(layer.lora_A[ADAPTER].weight), _full(layer.lora_B[ADAPTER].weight)
    return base.add_(up @ down, alpha=layer.scaling[ADAPTER])


def _full(parameter: Tensor) -> Tensor:
    """The whole value on this device, never a view of the parameter."""
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()
