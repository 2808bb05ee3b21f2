"""LoRA adapters by peft: add them, turn them off, merge them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwater.config.recipe import LoraSection
from headwater.errors import InvalidArgument
from headwater_trainer.sharding import full

# isort: off
from headwater.diffusion.families import Family  # before peft, which imports torchvision: see torchvision_ops
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
# isort: on

ADAPTER = "default"


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


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Within it the adapters of `module` do nothing."""
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters(False) would also freeze the parameters
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def lora_layers(module: nn.Module) -> Mapping[str, LoraLinear]:
    """The adapted layers by the name of the layer."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


def merged(layer: LoraLinear) -> Tensor:
    """The whole weight with its adapter: W + alpha / rank * B @ A; a copy."""
    base = full(layer.base_layer.weight)
    down, up = full(layer.lora_A[ADAPTER].weight), full(layer.lora_B[ADAPTER].weight)
    return base.add_(up @ down, alpha=layer.scaling[ADAPTER])
