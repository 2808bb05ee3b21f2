"""A CLIP model from a local folder or a hub id, as several rewards use it. Needs the extra `reward-clip`.

Only safetensors are read: a checkpoint that is a pickle (.bin, .pt, .pth) is refused. Letters of array names: N images
or texts, D embedding, H and W pixels.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from headwater.errors import FailedPrecondition, HeadwaterError, InvalidArgument
from headwater_reward.registry import RewardOptions, ScoreItem
from headwater_reward.rewards import video

if TYPE_CHECKING:
    import torch

REQUIRES = ("torch", "transformers", "safetensors")
EXTRA = "reward-clip"
MAX_ASPECT = 16  # CLIP's processor scales the short side to its own size: a thin strip would become a huge image
MAX_FRAMES_AT_ONCE = 64


class ClipOptions(RewardOptions):
    """Options of the rewards that run a CLIP model."""

    model: str = Field(description="give a folder or a hub id of a CLIP model in transformers' format")
    revision: str = "main"  # of a hub id
    processor: str = ""  # folder or hub id of tokenizer and image processor; empty: that of the model
    device: str = ""  # e.g. "cuda:1"; empty: the first GPU, else the CPU
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"


class Clip:
    """Embeddings of images and texts, of length 1, fp32 [N, D] on the CPU."""

    def __init__(self, options: ClipOptions, threads: int) -> None:
        """Load. Raises `FailedPrecondition` when something is missing or does not fit."""
        import torch

        from headwater.diffusion import torchvision_ops

        torchvision_ops.declare_missing()
        torch.set_num_threads(threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="clip-pixels")  # Pillow works without the GIL
        self._device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
        self._model, self._tokenizer, self._processor = _load(options, dtype, self._device)
        self.logit_scale = float(self._model.logit_scale.detach().float().exp())
        self.width = int(self._model.config.projection_dim)

    def embed_images(self, images_HWC: Sequence[np.ndarray]) -> "torch.Tensor":
        """Images as uint8 [H, W, 3], of any sizes."""
        import torch

        parts = []
        for start in range(0, len(images_HWC), MAX_FRAMES_AT_ONCE):
            images = [Image.fromarray(image_HWC) for image_HWC in images_HWC[start : start + MAX_FRAMES_AT_ONCE]]
            pixels = torch.cat(list(self._pool.map(self._pixels, images)))
            with torch.inference_mode():
                features = self._model.get_image_features(pixels.to(self._device, self._model.dtype))
            parts.append(_unit(features.pooler_output))
        return torch.cat(parts)

    def _pixels(self, image: Image.Image) -> "torch.Tensor":
        return self._processor(images=[image], return_tensors="pt")["pixel_values"]

    def embed_texts(self, texts: Sequence[str]) -> "torch.Tensor":
        """Each distinct text is embedded once; what is longer than the model's context is cut off."""
        import torch

        distinct = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        tokens = self._tokenizer(
            list(distinct), padding=True, truncation=True, max_length=self._context, return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            features = self._model.get_text_features(**tokens)
        return _unit(features.pooler_output)[[distinct[text] for text in texts]]

    @property
    def _context(self) -> int:
        return int(self._model.config.text_config.max_position_embeddings)


def frame_values(
    batch: Sequence[ScoreItem], compute: Callable[[list[np.ndarray], list[int]], list[float]]
) -> list[list[float] | HeadwaterError]:
    """Per item the values of its frames, or why there are none.

    `compute(frames_HWC, owners)` gets the frames of all items at once, with the index of the item of each.
    """
    errors = [_check_aspect(item.frames_FHWC[0]) for item in batch]
    frames, owners = [], []
    for i, (item, error) in enumerate(zip(batch, errors, strict=True)):
        picked = [] if error else list(video.pick(item.frames_FHWC, item.params))
        frames += picked
        owners += [i] * len(picked)
    values = compute(frames, owners) if frames else []
    return [
        error or [value for value, owner in zip(values, owners, strict=True) if owner == i]
        for i, error in enumerate(errors)
    ]


def _check_aspect(image_HWC: np.ndarray) -> InvalidArgument | None:
    height, width = image_HWC.shape[:2]
    if max(height, width) <= MAX_ASPECT * min(height, width):
        return None
    return InvalidArgument(
        f"the image has {width}x{height} pixels; here one side may be at most {MAX_ASPECT} times the other",
        field="media",
        reason="MEDIA_INVALID",
    )


def _unit(features_ND: "torch.Tensor") -> "torch.Tensor":
    features_ND = features_ND.float()
    return (features_ND / features_ND.norm(dim=-1, keepdim=True)).cpu()


def _load(options: ClipOptions, dtype: "torch.dtype", device: "torch.device") -> tuple[Any, Any, Any]:
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    source = options.processor or options.model
    revision = {"revision": options.revision}
    try:
        model, info = CLIPModel.from_pretrained(
            options.model, **revision, use_safetensors=True, dtype=dtype, output_loading_info=True
        )
        tokenizer = CLIPTokenizer.from_pretrained(source, **({} if options.processor else revision))
        processor = CLIPImageProcessorPil.from_pretrained(source, **({} if options.processor else revision))
    except (OSError, ValueError, KeyError) as error:
        raise FailedPrecondition(
            f"the CLIP model {options.model!r} cannot be loaded: {error}. It must be a folder or hub id in the format "
            "of transformers, with its weights in model.safetensors (pickled weights are not read), tokenizer and "
            "preprocessor_config.json",
            reason="REWARD_MODEL_INVALID",
        ) from error
    if missing := sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"]):
        raise FailedPrecondition(
            f"the CLIP model {options.model!r} lacks weights, e.g. {missing[0]}: it is no whole CLIP model",
            reason="REWARD_MODEL_INVALID",
        )
    return model.eval().requires_grad_(False).to(device), tokenizer, processor
