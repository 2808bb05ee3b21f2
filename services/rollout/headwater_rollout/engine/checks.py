"""What an engine checks of a request before any work is done."""

from headwater.errors import InvalidArgument
from headwater_rollout.engine.base import EngineInfo, GroupRequest

MAX_SEED = 2**64 - 1


def check_request(request: GroupRequest, info: EngineInfo) -> None:
    """Raise `InvalidArgument` for what the image model described by `info` cannot make."""
    sampling = request.sampling
    if not request.prompt.strip():
        raise _invalid("prompt", "is empty; describe the picture in it")
    if not request.seeds:
        raise _invalid("seeds", "is empty; give one seed per sample")
    if bad := [seed for seed in request.seeds if not 0 <= seed <= MAX_SEED]:
        raise _invalid("seeds", f"contains {bad[0]}; a seed must be between 0 and 2^64 - 1")
    for name in ("height_px", "width_px"):
        value, multiple = getattr(sampling, name), info.size_multiple_px
        if value < multiple or value % multiple:
            near = max(multiple, round(value / multiple) * multiple)
            raise _invalid(f"sampling.{name}", f"is {value}; this model needs a multiple of {multiple}, e.g. {near}")
    if sampling.frame_count != 1:
        raise _invalid("sampling.frame_count", f"is {sampling.frame_count}; {info.family} makes still images, use 1")
    if sampling.guidance_scale_2 != sampling.guidance_scale:
        raise _invalid(
            "sampling.guidance_scale_2", f"is set, but {info.family} has one denoiser; leave it out or equal the first"
        )


def check_component(component: str, info: EngineInfo) -> None:
    """Raise `InvalidArgument` for a component that the engine described by `info` does not have."""
    if component not in info.components:
        raise InvalidArgument(
            f"component {component!r} does not exist in {info.family}; use one of {info.components}", field="component"
        )


def _invalid(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {what}", field=field, reason="REQUEST_INVALID")
