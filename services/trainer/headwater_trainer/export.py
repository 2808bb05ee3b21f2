"""Write a whole pipeline with trained weights, in the diffusers layout."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin")


def export_pipeline(
    model_dir: str | Path, out: Path, component: str, weights: Mapping[str, Tensor], dtype: str = "fp32"
) -> Path:
    """Copy the pipeline in `model_dir` to `out`, with `weights` (by diffusers name) in `component`.

    What `weights` leaves out keeps its value; the whole component is stored in `dtype` (fp32, fp16 or bf16). `out` is
    replaced and appears complete. Raises ValueError for a name that the component does not have.
    """
    source, temporary = Path(model_dir), out.with_name(f".tmp-{out.name}")
    tensors: dict[str, Tensor] = {}
    for path in sorted((source / component).glob("*.safetensors")):
        tensors |= load_file(path)
    if strange := sorted(set(weights) - set(tensors)):
        raise ValueError(f"{source / component} has no tensor {strange[0]}; it cannot be exported into this pipeline")
    tensors |= {name: weight.detach().cpu() for name, weight in weights.items()}
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=lambda folder, _: _left_out(Path(folder), source / component))
    stored = {name: tensor.to(_DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
    save_file(stored, temporary / component / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)
    return out


def _left_out(folder: Path, component: Path) -> list[str]:
    return [path.name for pattern in _WEIGHTS for path in folder.glob(pattern)] if folder == component else []
