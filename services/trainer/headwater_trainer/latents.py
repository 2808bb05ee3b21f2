"""Pictures and captions, encoded once and kept on disk: what supervised training reads."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import headwater.synthetic
from headwater.config.recipe import Recipe
from headwater.config.supervised import DataSection
from headwater.diffusion.families.codec import Codec
from headwater.errors import InvalidArgument
from headwater.synthetic.batches import batches

_ENCODER_BATCH = 256
_ON_DEVICE_BYTES = 16 << 30  # a set up to this size is kept on the GPU
_TEXT = "text."

Drawn = Iterable[tuple[np.ndarray, list[str]]]  # pictures uint8 [n, H, W, 3] and captions


@dataclass
class LatentSet:
    """N encoded pictures, each with one of U captions; the last caption is the one of dropped captions."""

    latents: Tensor  # fp32 [N, C, h, w]
    caption: Tensor  # int64 [N]
    text: dict[str, Tensor]  # conditioning, [U, ...]

    def __len__(self) -> int:
        return len(self.latents)

    def rows(self, index: Tensor, dropped: Tensor, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """Latents and conditioning of samples `index` int64 [B]; without their captions where `dropped` [B]."""
        index, dropped = index.to(self.latents.device), dropped.to(self.latents.device)
        last = len(next(iter(self.text.values()))) - 1
        caption = torch.where(dropped, last, self.caption[index])
        text = {name: tensor[caption].to(device, non_blocking=True) for name, tensor in self.text.items()}
        return self.latents[index].to(device, non_blocking=True), text

    def to(self, device: torch.device) -> "LatentSet":
        """The set on a GPU when it is small; otherwise as it is."""
        size = sum(tensor.nbytes for tensor in (self.latents, self.caption, *self.text.values()))
        if device.type != "cuda" or size > _ON_DEVICE_BYTES:
            return self
        text = {name: tensor.to(device) for name, tensor in self.text.items()}
        return LatentSet(self.latents.to(device), self.caption.to(device), text)


def cache_path(recipe: Recipe, folder: Path) -> Path:
    """Where the encoded set of a recipe lies: named by the content of encoders and data."""
    assert recipe.data is not None
    model, digest = Path(recipe.model.path), hashlib.sha256()
    parts = [
        path for path in sorted(model.iterdir()) if path.is_dir() and path.name.startswith(("text_", "tok", "vae"))
    ]
    for path in (file for part in parts for file in sorted(part.rglob("*")) if file.is_file()):
        _add_file(digest, path)
    sampling, data = recipe.sampling, recipe.data
    digest.update(json.dumps([sampling.height_px, sampling.width_px, sampling.negative_prompt]).encode())
    if data.path is None:
        digest.update(json.dumps([data.generator, data.count, data.seed]).encode())
        for path in sorted(Path(headwater.synthetic.__file__).parent.glob("*.py")):
            _add_file(digest, path)
    else:
        _add_file(digest, Path(data.path))
        for image, _ in _entries(Path(data.path)):
            _add_file(digest, image)
    return folder / f"{digest.hexdigest()[:32]}.safetensors"


def encode(recipe: Recipe, codec: Codec, path: Path) -> None:
    """Write the encoded set of a recipe to `path`, unless it is there. Raises `InvalidArgument` for unusable data."""
    if path.exists():
        return
    assert recipe.data is not None
    latents: list[Tensor] = []
    captions: list[int] = []
    known: dict[str, int] = {}
    for pictures, texts in _drawn(recipe.data, recipe.sampling.height_px, recipe.sampling.width_px):
        latents.append(codec.encode_pictures(torch.from_numpy(pictures)).cpu().contiguous())
        captions += [known.setdefault(text, len(known)) for text in texts]
    texts = [*known, recipe.sampling.negative_prompt]
    parts = [codec.encode_text(texts[i : i + _ENCODER_BATCH]) for i in range(0, len(texts), _ENCODER_BATCH)]
    text = {_TEXT + name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file({"latents": torch.cat(latents), "caption": torch.tensor(captions), **text}, temporary)
    os.replace(temporary, path)


def load_set(path: Path) -> LatentSet:
    """Read what `encode` wrote."""
    tensors = load_file(path)
    text = {name.removeprefix(_TEXT): tensor for name, tensor in tensors.items() if name.startswith(_TEXT)}
    return LatentSet(tensors["latents"], tensors["caption"], text)


def _drawn(data: DataSection, height_px: int, width_px: int) -> Drawn:
    if data.path is not None:
        yield from _read(Path(data.path), height_px, width_px)
        return
    if height_px != width_px:
        raise InvalidArgument(
            f"data.generator draws squares; sampling.height_px is {height_px} and width_px {width_px}",
            field="sampling.width_px",
        )
    yield from batches(data.count, seed=data.seed, size_px=height_px, processes=data.processes)


def _read(path: Path, height_px: int, width_px: int) -> Iterator[tuple[np.ndarray, list[str]]]:
    entries = list(_entries(path))
    if not entries:
        raise InvalidArgument(f"data.path: {path} holds no pictures", field="data.path")
    for begin in range(0, len(entries), _ENCODER_BATCH):
        part = entries[begin : begin + _ENCODER_BATCH]
        yield np.stack([_picture(image, height_px, width_px) for image, _ in part]), [text for _, text in part]


def _picture(path: Path, height_px: int, width_px: int) -> np.ndarray:
    """uint8 [H, W, 3]: scaled to cover, cut in the middle."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    scale = max(width_px / image.width, height_px / image.height)
    if scale != 1:
        size = (max(width_px, round(image.width * scale)), max(height_px, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS)
    left, top = (image.width - width_px) // 2, (image.height - height_px) // 2
    return np.asarray(image.crop((left, top, left + width_px, top + height_px)))


def _entries(path: Path) -> Iterator[tuple[Path, str]]:
    """(picture, caption) of each line. Raises `InvalidArgument` naming the line."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            image, text = path.parent / str(entry["image"]), str(entry["prompt"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise _bad_line(path, number, f'is not {{"image": …, "prompt": …}}: {error}') from None
        if not image.is_file():
            raise _bad_line(path, number, f"names a picture that is not there: {image}")
        yield image, text


def _bad_line(path: Path, number: int, why: str) -> InvalidArgument:
    return InvalidArgument(f"data.path: line {number} of {path} {why}", field="data.path", reason="DATA_INVALID")


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    digest.update(f"{path.name} {path.stat().st_size} ".encode())
    with path.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
