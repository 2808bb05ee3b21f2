"""The diffusion engines of a rollout worker."""

from pathlib import Path

from headwater.errors import InvalidArgument
from headwater_rollout.engine.base import Engine

ENGINES = ("sglang", "diffusers")
PRECISIONS = ("fp32", "bf16")


def load_engine(kind: str, model: str | Path, precision: str = "fp32", device: str = "cpu") -> Engine:
    """Load the pipeline folder `model` into an engine of `kind`.

    `precision` is "fp32" or "bf16", `device` a torch device such as "cpu" or "cuda:0". Raises `InvalidArgument` for an
    unknown engine, precision or device, and for a folder that is no pipeline of a supported family.
    """
    _one_of("engine", kind, ENGINES)
    _one_of("precision", precision, PRECISIONS)
    if not (Path(model) / "model_index.json").is_file():
        raise InvalidArgument(
            f"model {str(model)!r} is not the folder of a diffusers pipeline: it has no model_index.json; "
            "download one, or make a tiny one with `python -m headwater.diffusion.tiny_sd3 OUT`",
            field="model",
        )
    _check_device(device)
    _check_family(model)
    if kind == "sglang":
        from headwater_rollout.engine.sglang.engine import SglangEngine

        return SglangEngine(model, precision, device)
    from headwater_rollout.engine.diffusers_engine import DiffusersEngine

    return DiffusersEngine(model, precision, device)


def _check_family(model: str | Path) -> None:
    from headwater.diffusion import families

    try:
        families.resolve(model)
    except ValueError as error:
        raise InvalidArgument(str(error), field="model") from error


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name} {value!r} is unknown; use one of {', '.join(known)}", field=name)


def _check_device(device: str) -> None:
    import torch

    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgument(f"device {device!r} is unknown: {error}", field="device") from None
    if parsed.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device {device!r} is not supported; use 'cpu' or 'cuda:N'", field="device")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise InvalidArgument(
            f"device {device!r} does not exist: torch sees {torch.cuda.device_count()} CUDA devices", field="device"
        )
