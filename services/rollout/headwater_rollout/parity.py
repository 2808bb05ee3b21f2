"""Does the trainer compute what the engine computed? `python -m headwater_rollout.parity MODEL`.

The engine generates one group and records latents and model outputs. The trainer's code (`headwater.diffusion`) then
recomputes the model output and the log-probability at every stochastic step, on the same latents. In fp32 on a CPU, at
the engine's batch shape, both must be equal bit for bit, so that the first ratio of a run is exactly 1; elsewhere the
log-probabilities must agree within a threshold that is far below any clip range.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from headwater.diffusion import families
from headwater.diffusion.transitions import grid_transition
from headwater.errors import HeadwaterError
from headwater.sampling import ResolvedSampling
from headwater_rollout.engine import PRECISIONS, load_engine
from headwater_rollout.engine.base import GroupRequest, GroupResult


@dataclass(frozen=True)
class StepFigures:
    """Trainer against engine at one stochastic step; the worst sample of the group."""

    step: int
    sigma: float
    output_max: float  # largest absolute difference of the model output
    output_relative: float  # norm of the difference over the norm of the engine's output
    log_prob: float  # |log p_trainer - log p_engine|
    ratio: float  # |exp(log p_trainer - log p_engine) - 1|


@dataclass(frozen=True)
class Comparison:
    """All steps for one precision and one micro-batch of the trainer."""

    precision: str
    micro_batch: int
    steps: tuple[StepFigures, ...]

    def worst(self, name: str) -> float:
        """The largest value of a figure over all steps."""
        return max(getattr(step, name) for step in self.steps)


def recompute(
    model: str, request: GroupRequest, result: GroupResult, *, precision: str, micro_batch: int, device: str
) -> tuple[Tensor, Tensor]:
    """Model outputs fp32 [n, W, ...] and log-probabilities fp32 [n, W] of the trainer on the recorded latents.

    The denoiser has fp32 weights and, with "bf16", runs under autocast; `micro_batch` samples at a time.
    """
    family = families.resolve(model)
    module = family.load_component(model, "transformer", torch.float32).to(device)
    outputs, log_probs = [], []
    for step in result.trained_steps:
        at = result.latent_positions.index(step)
        rows = []
        for latent in result.latents[:, at].to(device).split(micro_batch):
            # With gradients, as in training: kernels may differ without.
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
                rows.append(_velocity(family, module, latent, result, request.sampling, step).detach())
        velocity = torch.cat(rows)
        transition = grid_transition(
            request.sampling.transition,
            result.latents[:, at].to(device),
            velocity,
            sigmas=result.sigmas.to(device),
            step=step,
            noise_level=request.sampling.noise_level,
        )
        outputs.append(velocity.cpu())
        log_probs.append(transition.log_prob(result.latents[:, at + 1].to(device)).cpu())
    return torch.stack(outputs, dim=1), torch.stack(log_probs, dim=1)


def _velocity(
    family: families.Family,
    module: nn.Module,
    latent: Tensor,
    result: GroupResult,
    sampling: ResolvedSampling,
    step: int,
) -> Tensor:
    timestep = result.timesteps[step].to(latent.device).repeat(len(latent))

    def branch(conditioning: Mapping[str, Tensor]) -> Tensor:
        batch = {
            name: value.to(latent.device).expand(len(latent), *value.shape) for name, value in conditioning.items()
        }
        return family.predict(module, latent, timestep, batch)

    positive = branch(result.positive)
    if sampling.guidance_scale <= 1:
        return positive
    return family.guided(positive, branch(result.negative), sampling.guidance_scale)


def compare(
    model: str, request: GroupRequest, result: GroupResult, *, precision: str, micro_batch: int, device: str
) -> Comparison:
    """Figures of the trainer at `micro_batch` against the engine's `result`, which must hold its model outputs."""
    assert result.model_outputs is not None
    outputs, log_probs = recompute(model, request, result, precision=precision, micro_batch=micro_batch, device=device)
    difference = outputs - result.model_outputs
    drift = log_probs - result.log_probs
    steps = tuple(
        StepFigures(
            step=step,
            sigma=result.sigmas[step].item(),
            output_max=difference[:, index].abs().max().item(),
            output_relative=(difference[:, index].norm() / result.model_outputs[:, index].norm()).item(),
            log_prob=drift[:, index].abs().max().item(),
            ratio=(drift[:, index].exp() - 1).abs().max().item(),
        )
        for index, step in enumerate(result.trained_steps)
    )
    return Comparison(precision, micro_batch, steps)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Generate, compare, and judge. Returns what `--json` prints."""
    n, device = arguments.n, arguments.device
    request = GroupRequest(arguments.prompt, tuple(range(n)), _sampling(arguments), record_model_outputs=True)
    exact = arguments.precision == "fp32" and device == "cpu"
    comparisons: list[Comparison] = []
    for precision in (arguments.precision, *(other for other in PRECISIONS if other != arguments.precision)):
        engine = load_engine("sglang", arguments.model, precision, device)
        result = engine.generate(request)
        for micro_batch in sorted({n, max(1, n // 2), 1}, reverse=True):
            comparisons.append(
                compare(arguments.model, request, result, precision=precision, micro_batch=micro_batch, device=device)
            )
        info = engine.info
        engine.close()
    judged = comparisons[0]  # the precision that was asked for, at the engine's own batch shape
    drift = judged.worst("log_prob")
    passed = judged.worst("output_max") == 0 and drift == 0 if exact else drift <= arguments.max_log_prob_difference
    return {
        "passed": passed,
        "requirement": "bit-identical" if exact else f"|dlogp| <= {arguments.max_log_prob_difference:g}",
        "model": info.model,
        "engine": f"{info.engine} {info.engine_version}",
        "device": info.device,
        "prompt": arguments.prompt,
        "n": n,
        "step_count": arguments.steps,
        "max_output_difference": judged.worst("output_max"),
        "max_log_prob_difference": drift,
        "max_ratio_deviation": judged.worst("ratio"),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }


def _sampling(arguments: argparse.Namespace) -> ResolvedSampling:
    """All steps but the last are stochastic, as in training by default."""
    return ResolvedSampling(
        steps=arguments.steps,
        height_px=arguments.size_px,
        width_px=arguments.size_px,
        frame_count=1,
        frames_per_second=None,
        guidance_scale=arguments.guidance_scale,
        guidance_scale_2=arguments.guidance_scale,
        negative_prompt="",
        flow_shift=None,
        transition=arguments.transition,
        noise_level=arguments.noise_level,
        stochastic_steps=tuple(range(arguments.steps - 1)),
    )


def print_tables(report: Mapping[str, object]) -> None:
    """One table for the comparison that is judged, one line for each other."""
    comparisons: Sequence[dict[str, object]] = report["comparisons"]  # type: ignore[assignment]
    print(f"{report['engine']} on {report['device']}, {report['model']}, {report['n']} samples, trainer against engine")
    print(f"\n{comparisons[0]['precision']}, micro-batch {comparisons[0]['micro_batch']} (the engine's batch)")
    print(f"{'step':>4} {'sigma':>8} {'output max':>11} {'output rel':>11} {'|dlogp|':>10} {'|ratio-1|':>10}")
    rows: Sequence[dict[str, float]] = comparisons[0]["steps"]  # type: ignore[assignment]
    for row in rows:
        print(
            f"{row['step']:>4} {row['sigma']:>8.4f} {row['output_max']:>11.2e} {row['output_relative']:>11.2e}"
            f" {row['log_prob']:>10.2e} {row['ratio']:>10.2e}"
        )
    print("\nother shapes and precisions, worst step (for information)")
    for comparison in comparisons[1:]:
        steps: Sequence[dict[str, float]] = comparison["steps"]  # type: ignore[assignment]
        worst = {
            name: max(step[name] for step in steps) for name in ("output_max", "output_relative", "log_prob", "ratio")
        }
        print(
            f"{comparison['precision']}, micro-batch {comparison['micro_batch']}: output max {worst['output_max']:.2e},"
            f" rel {worst['output_relative']:.2e}, |dlogp| {worst['log_prob']:.2e}, |ratio-1| {worst['ratio']:.2e}"
        )
    print(
        f"\n{'PASS' if report['passed'] else 'FAIL'}: required {report['requirement']}, found output difference "
        f"{report['max_output_difference']:.2e}, |dlogp| {report['max_log_prob_difference']:.2e}"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="headwater parity", description=__doc__.split("\n", 1)[0] if __doc__ else None)
    made.add_argument("model", help="folder of a diffusers pipeline")
    made.add_argument("--prompt", default="a red circle", help="what to generate (default: %(default)s)")
    made.add_argument("--n", type=int, default=4, help="group size (default: %(default)s)")
    made.add_argument("--steps", type=int, default=10, help="denoise steps (default: %(default)s)")
    made.add_argument("--size-px", type=int, default=64, help="height and width (default: %(default)s)")
    made.add_argument("--guidance-scale", type=float, default=1.0, help="1 is none (default: %(default)s)")
    made.add_argument("--transition", choices=("sde", "cps", "dance"), default="sde", help="default: %(default)s")
    made.add_argument("--noise-level", type=float, default=0.7, help="default: %(default)s")
    made.add_argument("--precision", choices=PRECISIONS, default="fp32", help="to judge (default: %(default)s)")
    made.add_argument("--device", default="cpu", help="cpu or cuda:N (default: %(default)s)")
    made.add_argument(
        "--max-log-prob-difference", type=float, default=1e-4, metavar="D",
        help="largest |dlogp| that passes where bit-identity cannot be had (default: %(default)s)",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0: within the requirement. 1: not. 2: the request was wrong."""
    arguments = parser().parse_args(argv)
    if arguments.n < 1 or arguments.steps < 2:
        parser().error("--n must be at least 1 and --steps at least 2")
    try:
        report = run(arguments)
    except HeadwaterError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    print_tables(report)
    if arguments.json:
        print(json.dumps(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
