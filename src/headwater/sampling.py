"""Validate `SamplingParams` and choose the stochastic steps of a group. Shared by all services, hence no torch."""

import math
import random
from dataclasses import dataclass

from headwater.common.v1.sampling_pb2 import SamplingParams, TransitionKind, TransitionParams
from headwater.errors import InvalidArgument

DEFAULT_NOISE_LEVEL = 0.7
MAX_STEPS = 1000
MAX_SIDE_PX = 8192


@dataclass(frozen=True)
class ResolvedSampling:
    """Sampling parameters with every default filled in and every value checked."""

    steps: int
    height_px: int
    width_px: int
    frame_count: int
    frames_per_second: float | None
    guidance_scale: float
    guidance_scale_2: float
    negative_prompt: str
    flow_shift: float | None  # None: the model's own
    transition: str  # "sde" | "cps" | "ode" | "dance"
    noise_level: float
    stochastic_steps: tuple[int, ...]  # increasing; empty for "ode"


def resolve(params: SamplingParams, *, group_seed: int, size_multiple_px: int = 1) -> ResolvedSampling:
    """Check `params` and draw the SDE window from `group_seed`.

    Raises `InvalidArgument` naming the field below `sampling` and the remedy.
    """
    if not 1 <= params.steps <= MAX_STEPS:
        raise _invalid("steps", f"is {params.steps}; it must be between 1 and {MAX_STEPS}")
    for name in ("height_px", "width_px"):
        _check_side(name, getattr(params, name), size_multiple_px)
    guidance = params.guidance_scale if params.HasField("guidance_scale") else 1.0
    guidance_2 = params.guidance_scale_2 if params.HasField("guidance_scale_2") else guidance
    for name, value in (("guidance_scale", guidance), ("guidance_scale_2", guidance_2)):
        if not (math.isfinite(value) and value >= 0):
            raise _invalid(name, f"is {value}; it must be a finite number, at least 0 (1 means no guidance)")
    shift = params.flow_shift if params.HasField("flow_shift") else None
    if shift is not None and not (math.isfinite(shift) and shift > 0):
        raise _invalid("flow_shift", f"is {shift}; it must be a finite number above 0")
    kind, noise_level, stochastic = _resolve_transition(params, group_seed)
    return ResolvedSampling(
        steps=params.steps,
        height_px=params.height_px,
        width_px=params.width_px,
        frame_count=max(1, params.frame_count),
        frames_per_second=params.frames_per_second if params.HasField("frames_per_second") else None,
        guidance_scale=guidance,
        guidance_scale_2=guidance_2,
        negative_prompt=params.negative_prompt,
        flow_shift=shift,
        transition=kind,
        noise_level=noise_level,
        stochastic_steps=stochastic,
    )


def _check_side(name: str, value: int, multiple: int) -> None:
    if not 1 <= value <= MAX_SIDE_PX:
        raise _invalid(name, f"is {value}; it must be between 1 and {MAX_SIDE_PX} pixels")
    if value % multiple:
        near = max(multiple, round(value / multiple) * multiple)
        raise _invalid(
            name, f"is {value}, which this model's VAE cannot make; use a multiple of {multiple}, e.g. {near}"
        )


def _resolve_transition(params: SamplingParams, group_seed: int) -> tuple[str, float, tuple[int, ...]]:
    if not params.HasField("transition"):
        return "ode", 0.0, ()
    transition = params.transition
    kind = _kind_name(transition)
    noise_level = transition.noise_level if transition.HasField("noise_level") else DEFAULT_NOISE_LEVEL
    if not (math.isfinite(noise_level) and noise_level >= 0):
        raise _invalid("transition.noise_level", f"is {noise_level}; it must be a finite number, at least 0")
    if kind == "ode":
        return "ode", 0.0, ()
    if noise_level == 0:
        raise _invalid(
            "transition.noise_level", "is 0, which leaves no randomness; raise it or use TRANSITION_KIND_ODE"
        )
    steps = stochastic_steps(transition, total_steps=params.steps, group_seed=group_seed)
    if kind == "cps" and params.steps - 1 in steps:
        raise _invalid(
            "transition", "makes the last step stochastic, where CPS has a std of 0; leave the last step out"
        )
    return kind, noise_level, steps


def _kind_name(transition: TransitionParams) -> str:
    names = {
        TransitionKind.TRANSITION_KIND_UNSPECIFIED: "sde",
        TransitionKind.TRANSITION_KIND_SDE: "sde",
        TransitionKind.TRANSITION_KIND_CPS: "cps",
        TransitionKind.TRANSITION_KIND_ODE: "ode",
        TransitionKind.TRANSITION_KIND_DANCE: "dance",
    }
    if transition.kind not in names:
        raise _invalid("transition.kind", f"has the unknown value {transition.kind}; use a TransitionKind")
    return names[transition.kind]


def stochastic_steps(transition: TransitionParams, *, total_steps: int, group_seed: int) -> tuple[int, ...]:
    """The stochastic steps of a group: the explicit ones, a window drawn from `group_seed`, or all but the last."""
    selection = transition.WhichOneof("selection")
    if selection == "explicit_steps":
        steps = tuple(transition.explicit_steps.steps)
        if not steps or list(steps) != sorted(set(steps)) or steps[-1] >= total_steps:
            raise _invalid(
                "transition.explicit_steps.steps",
                f"is {list(steps)}; it must be strictly increasing, not empty, and below steps = {total_steps}",
            )
        return steps
    if selection == "window":
        return _draw_window(transition, total_steps, group_seed)
    if total_steps < 2:
        raise _invalid("steps", "is 1, and the last step is deterministic by default; name explicit_steps or use more")
    return tuple(range(total_steps - 1))


def _draw_window(transition: TransitionParams, total_steps: int, group_seed: int) -> tuple[int, ...]:
    window = transition.window
    begin = window.range_begin
    end = window.range_end if window.HasField("range_end") else total_steps - 1
    if window.size < 1 or end > total_steps or begin + window.size > end:
        raise _invalid(
            "transition.window",
            f"of size {window.size} in [{begin}, {end}) does not fit a schedule of {total_steps} steps; "
            f"need size >= 1, range_end <= {total_steps} and range_begin + size <= range_end",
        )
    start = random.Random(group_seed).randint(begin, end - window.size)
    return tuple(range(start, start + window.size))


def _invalid(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"sampling.{field} {what}", field=f"sampling.{field}", reason="SAMPLING_INVALID")
