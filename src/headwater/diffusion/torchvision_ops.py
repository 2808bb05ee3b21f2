"""Let a torchvision that was built for CUDA be imported beside a CPU build of torch.

SGLang's pinned torchvision wheel is a CUDA build. Its extension cannot load without the CUDA libraries, and torchvision
then fails on import while it registers shapes for operators that do not exist ("operator torchvision::nms does not
exist"); transformers and diffusers import torchvision and fail with it. Nothing here calls these operators: declaring
them is enough.
"""

import importlib.util
from pathlib import Path

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None  # the declarations live as long as this object


def declare_missing() -> None:
    """Declare torchvision's operators when its extension cannot load. Call before anything imports torchvision."""
    global _library
    if _library is not None or torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _extension_loads(Path(spec.origin).parent):
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(name + _SIGNATURE)


def _extension_loads(folder: Path) -> bool:
    for extension in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            return False
    return True
