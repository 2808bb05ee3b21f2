"""Find the tensors of a diffusers checkpoint in SGLang's live module."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from headwater.errors import Internal


def live_views(module: nn.Module, component_dir: Path) -> Mapping[str, Sequence[Tensor]]:
    """Views into `module` by the names of the checkpoint in `component_dir`.

    SGLang runs SD3 with diffusers' own blocks, so names and shapes are the same. Raises `Internal` when a name of the
    checkpoint is missing or has another shape, as would be the case after a change of SGLang's layout.
    """
    live, shapes = module.state_dict(), checkpoint_shapes(component_dir)
    strange = sorted(name for name in shapes if name not in live or tuple(live[name].shape) != shapes[name])
    strange += sorted(live.keys() - shapes.keys())
    if strange:
        raise Internal(
            f"{len(strange)} tensors of {component_dir} and of SGLang's {type(module).__name__} do not correspond, "
            f"e.g. {strange[:3]}; this sglang lays the model out differently, install the version Headwater pins"
        )
    return {name: (live[name],) for name in shapes}


def checkpoint_shapes(component_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a component's safetensors files, in the order of the files; no tensor is read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(component_dir):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _weight_files(component_dir: Path) -> list[Path]:
    index = component_dir / "diffusion_pytorch_model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [component_dir / name for name in sorted(names)]
    return [component_dir / "diffusion_pytorch_model.safetensors"]
