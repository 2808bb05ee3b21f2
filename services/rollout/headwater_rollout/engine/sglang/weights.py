"""Find the parameters of a diffusers model in SGLang's live module."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from headwater.errors import Internal


def live_views(module: nn.Module, component_dir: Path) -> Mapping[str, Sequence[Tensor]]:
    """Views into `module` by the parameter names of the diffusers model in `component_dir`.

    SGLang runs SD3 with diffusers' own blocks, so names and shapes are the same. Raises `Internal` when a parameter is
    missing or has another shape, as would be the case after a change of SGLang's layout.
    """
    live, shapes = module.state_dict(), parameter_shapes(component_dir)
    strange = [name for name in shapes if name not in live or tuple(live[name].shape) != shapes[name]]
    if strange:
        raise Internal(
            f"{len(strange)} parameters of {component_dir} have no counterpart in SGLang's {type(module).__name__}, "
            f"e.g. {strange[:3]}; this sglang lays the model out differently, install the version Headwater pins"
        )
    return {name: (live[name],) for name in shapes}


def parameter_shapes(component_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the diffusers model in `component_dir`, in its order; no weights are read."""
    import diffusers

    config = json.loads((component_dir / "config.json").read_text())
    with torch.device("meta"):
        skeleton = getattr(diffusers, config["_class_name"]).from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
