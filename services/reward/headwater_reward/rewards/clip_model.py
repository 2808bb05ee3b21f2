"""A CLIP model in the layout of transformers, from a local folder or a hub id. The only module here that uses torch.

The layout: `config.json`, `model.safetensors` (or its shards and index), `preprocessor_config.json` and a tokenizer.
Weights are read from safetensors only: pickled ones (`pytorch_model.bin`, `*.pt`) can run code and are refused.
torch and transformers are imported when a model loads, so that a server without learned rewards needs neither.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from headwater.errors import FailedPrecondition
from headwater_reward.registry import RewardParams

REQUIRES = ("torch", "transformers", "safetensors")


class ClipSettings(RewardParams):
    """What an operator says about a CLIP model with `--set REWARD.KEY=VALUE`."""

    model: str = Field(description="a folder or hub id of a CLIP model in the layout of transformers")
    revision: str = ""  # of a hub id; empty: its main branch
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    golden: str = ""  # JSON file of images and their recorded scores; empty: see docs/rewards.md


class ClipModel:
    """Unit-length features of images and prompts."""

    def __init__(self, settings: ClipSettings, *, threads: int) -> None:
        """Raises `FailedPrecondition` for a folder or id that does not hold a whole CLIP model."""
        import safetensors
        import torch
        import transformers

        import headwater.diffusion  # noqa: F401  before transformers: beside a CPU torch it mends a torchvision for CUDA

        torch.set_num_threads(threads)
        where = {"revision": settings.revision or "main", "local_files_only": _is_local(settings.model)}
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]
        try:
            model, info = transformers.CLIPModel.from_pretrained(
                settings.model, use_safetensors=True, output_loading_info=True, dtype=dtype, **where
            )
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model, **where)
            self._processor = transformers.AutoImageProcessor.from_pretrained(settings.model, **where)
            missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
            if missing:  # transformers would fill these with random numbers
                raise OSError(f"{len(missing)} of its tensors are missing or of another shape, e.g. {missing[0]}")
            self._model = model.to(settings.device).eval()
        except (OSError, ValueError, RuntimeError, KeyError, safetensors.SafetensorError) as error:
            raise FailedPrecondition(
                f"cannot load a CLIP model from {settings.model!r}: {error}; it must be a folder or hub id with "
                "config.json, model.safetensors, preprocessor_config.json and a tokenizer (docs/rewards.md)",
                reason="REWARD_MODEL_UNUSABLE",
            ) from error
        self._torch, self._device, self._dtype = torch, settings.device, dtype
        self.logit_scale = float(self._model.logit_scale.detach().float().exp())

    def image_features(self, images_HWC: Sequence[np.ndarray]) -> np.ndarray:
        """Of uint8 RGB images of any sizes: fp32 [N, D] of length 1."""
        pictures = [Image.fromarray(np.ascontiguousarray(image)) for image in images_HWC]
        pixels = self._processor(images=pictures, return_tensors="pt")["pixel_values"].to(self._device, self._dtype)
        with self._torch.inference_mode():
            return self._unit(self._model.visual_projection(self._model.vision_model(pixels).pooler_output))

    def text_features(self, prompts: Sequence[str]) -> np.ndarray:
        """Of prompts: fp32 [N, D] of length 1. What is longer than the model reads (77 tokens) is cut off."""
        different = list(dict.fromkeys(prompts))  # the images of a group share one prompt
        limit = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(different, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        inputs = {key: tokens[key].to(self._device) for key in ("input_ids", "attention_mask")}
        with self._torch.inference_mode():
            features = self._unit(self._model.text_projection(self._model.text_model(**inputs).pooler_output))
        return features[[different.index(prompt) for prompt in prompts]]

    def _unit(self, features: Any) -> np.ndarray:
        features = features.float()
        return (features / features.norm(dim=-1, keepdim=True)).cpu().numpy()


def read_tensors(file: str) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file as fp32. Raises `FailedPrecondition`."""
    import safetensors
    from safetensors.numpy import load_file

    try:
        return {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
    except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise FailedPrecondition(
            f"cannot read {file!r}: {error}; it must be a safetensors file in fp32 or fp16",
            reason="REWARD_MODEL_UNUSABLE",
        ) from error


def _is_local(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or Path(model).is_dir()


def read_golden(file: str) -> list[dict[str, Any]]:
    """Golden images of an operator: [{"image": PNG beside the file, "prompt", "score", "tolerance"}] with pixels."""
    try:
        entries = json.loads(Path(file).read_text())
        for entry in entries:
            with Image.open(Path(file).parent / entry["image"]) as image:
                entry["pixels"] = np.asarray(image.convert("RGB"))
            entry["score"], entry["tolerance"] = float(entry["score"]), float(entry.get("tolerance", 0.01))
            entry["prompt"] = str(entry["prompt"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FailedPrecondition(
            f"cannot read golden images from {file!r}: {type(error).__name__} {error}; it is a JSON list of objects "
            'with "image", "prompt" and "score"',
            reason="REWARD_GOLDEN_UNUSABLE",
        ) from error
    return list(entries)
