"""Check the mathematics against golden vectors: `python -m headwater.diffusion.golden DIR [--json]`.

DIR holds pairs <name>.json + <name>.safetensors (tensors named case<k>.<field>) or a lone <name>.json. Every file with
a checker here is checked; others are listed as skipped. Exit status: 0 all pass, 1 a failure, 2 nothing to check.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from headwater.diffusion.advantages import AdvantageRule, advantages
from headwater.diffusion.decay import ema_decay
from headwater.diffusion.losses import flow_grpo_loss, kl_to_reference
from headwater.diffusion.transitions import Transition, transition
from headwater.text_match import ocr_score

REL, RATIO_REL, ADVANTAGE_ABS = 1e-5, 1e-6, 1e-9


@dataclass(frozen=True)
class Row:
    """One line of the table: the worst error of one field of one case. Relative errors are relative to the largest
    expected magnitude of the tensor."""

    file: str
    case: str
    field: str
    worst_error: float | None
    tolerance: float | None
    status: str  # "pass" | "FAIL" | "FAIL: why" | "skipped: why"


Case = Mapping[str, Any]


@dataclass(frozen=True)
class Tensors:
    """The tensors of one case by field; each look-up gives a fresh copy."""

    stored: Mapping[str, Tensor]
    prefix: str

    def __call__(self, field: str) -> Tensor:
        """The tensor of `field`."""
        return self.stored[self.prefix + field].clone()

    def __contains__(self, field: str) -> bool:
        return self.prefix + field in self.stored


def check_sde_step(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """One denoise step: mean, s, log-prob, its gradient, the sample drawn and the KL to a reference."""
    velocity = tensor("model_output").requires_grad_()
    step = _recorded_step(case, tensor, case["sde_type"], velocity)
    log_prob = step.log_prob(tensor("prev_sample"))
    (gradient,) = torch.autograd.grad(log_prob.sum(), velocity)
    reference = _recorded_step(case, tensor, case["sde_type"], tensor("model_output_ref"))
    found = {
        "prev_sample_mean": step.mean,
        "std_dev_t": step.noise_scale,
        "log_prob": log_prob,
        "grad_sum_log_prob_wrt_model_output": gradient,
        "prev_sample": step.sample_next(tensor("noise")),
        "prev_sample_mean_ref": reference.mean,
        "log_prob_ref": reference.log_prob(tensor("prev_sample")),
    }
    if "kl" in tensor:
        found["kl"] = kl_to_reference(step.mean, reference.mean, step.noise_scale)
    for field, value in found.items():
        yield _relative(file, case, field, value, tensor(field), REL)


def check_flow_grpo_loss(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """The clipped policy gradient: ratio, loss, gradient, approximate KL, clip fraction."""
    if case["grpo_guard"]:
        yield Row(file, str(case["case"]), "*", None, None, "skipped: GRPO-Guard is not implemented")
        return
    velocity = tensor("model_output").requires_grad_()
    step = _recorded_step(case, tensor, "sde", velocity)
    outcome = flow_grpo_loss(
        step.log_prob(tensor("prev_sample")),
        tensor("log_prob_old"),
        tensor("advantage"),
        clip_range=case["clip_range"],
        adv_clip=case["adv_clip_max"],
    )
    loss = outcome.loss.mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    clipped = (outcome.clipped_up | outcome.clipped_down).float().mean()
    yield _relative(file, case, "ratio", outcome.ratio, tensor("ratio"), RATIO_REL)
    yield _relative(file, case, "loss", loss[None], tensor("loss"), REL)
    yield _relative(file, case, "grad_wrt_model_output", gradient, tensor("grad_wrt_model_output"), REL)
    yield _relative(file, case, "approx_kl", outcome.approx_kl.mean()[None], tensor("approx_kl"), REL)
    yield _relative(file, case, "clipfrac", clipped[None], tensor("clipfrac"), REL)


def check_advantages(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """Advantages in each prompt's group, in interleaved order."""
    rule = AdvantageRule(global_std=case["global_std"], ddof=case["std_ddof"])
    found = advantages(case["rewards"], case["prompts"], rule)
    error = float(np.abs(found - np.asarray(case["advantages"])).max())
    yield _row(file, case, "advantages", error, ADVANTAGE_ABS)


def check_ocr_reward(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """The score of recognised text, exactly."""
    found = ocr_score(case["prompt"], case["recognized"])
    yield _row(file, case, "reward", abs(found - case["reward"]), 0.0)


def check_decay_schedules(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """The decay of averaged weights, exactly."""
    if case["schedule"] != "ema_decay_cap":
        yield Row(file, str(case["case"]), case["schedule"], None, None, "skipped: the old policy is not implemented")
        return
    yield _row(file, case, "decay", abs(ema_decay(case["step"], case["max_decay"]) - case["decay"]), 0.0)


CHECKERS: Mapping[str, Callable[[str, Case, Tensors], Iterator[Row]]] = {
    "sde_step": check_sde_step,
    "flow_grpo_loss": check_flow_grpo_loss,
    "advantages": check_advantages,
    "ocr_reward": check_ocr_reward,
    "decay_schedules": check_decay_schedules,
}


def check_directory(directory: Path) -> list[Row]:
    """One row per file, case and field of every vector file in `directory`, in the order of file names."""
    rows: list[Row] = []
    for path in sorted(directory.glob("*.json")):
        if path.stem in CHECKERS:
            rows.extend(_check_file(path))
        else:
            rows.append(Row(path.stem, "*", "*", None, None, "skipped: no checker for this file"))
    return rows


def _check_file(path: Path) -> Iterator[Row]:
    cases = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(cases, dict):  # several lists by name
        cases = [{"schedule": name, **case} for name, listed in cases.items() for case in listed]
    bundle = path.with_suffix(".safetensors")
    stored: dict[str, Tensor] = {}
    if bundle.exists():
        with safe_open(bundle, framework="pt") as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for position, raw in enumerate(cases):
        case = {"case": position, **raw}
        try:
            yield from CHECKERS[path.stem](path.stem, case, Tensors(stored, f"case{case['case']}."))
        except (KeyError, ValueError, RuntimeError) as error:  # a malformed case is a failure, not the end of the table
            yield Row(path.stem, str(case["case"]), "*", None, 0.0, f"FAIL: {type(error).__name__}: {error}")


def _recorded_step(case: Case, tensor: Tensors, kind: str, velocity: Tensor) -> Transition:
    sigmas, index = tensor("sigmas"), tensor("step_index")
    return transition(
        kind,
        tensor("sample"),
        velocity,
        sigma=sigmas[index],
        next_sigma=sigmas[index + 1],
        sigma_after_first=sigmas[1],
        noise_level=case["noise_level"],
    )


def _relative(file: str, case: Case, field: str, found: Tensor, expected: Tensor, tolerance: float) -> Row:
    if found.shape != expected.shape:
        why = f"FAIL: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        return Row(file, str(case["case"]), field, None, tolerance, why)
    scale = float(expected.abs().max()) or 1.0
    return _row(file, case, field, float((found.detach() - expected).abs().max()) / scale, tolerance)


def _row(file: str, case: Case, field: str, error: float, tolerance: float) -> Row:
    passed = error <= tolerance  # False for NaN
    return Row(file, str(case["case"]), field, error, tolerance, "pass" if passed else "FAIL")


def _print_table(rows: list[Row]) -> None:
    print(f"{'file':<16} {'case':>4}  {'field':<36} {'worst error':>12} {'tolerance':>10}  status")
    for row in rows:
        error = "" if row.worst_error is None else f"{row.worst_error:.2e}"
        tolerance = "" if row.tolerance is None else f"{row.tolerance:.0e}"
        print(f"{row.file:<16} {row.case:>4}  {row.field:<36} {error:>12} {tolerance:>10}  {row.status}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="headwater.diffusion.golden", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="folder with the vector files")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    rows = check_directory(options.directory)
    checked = [row for row in rows if row.tolerance is not None]
    failed = [row for row in checked if row.status.startswith("FAIL")]
    if not options.json:
        _print_table(rows)
    skipped = len(rows) - len(checked)
    summary = {"checked": len(checked), "failed": len(failed), "skipped": skipped, "known_files": sorted(CHECKERS)}
    if options.json:
        print(json.dumps({**summary, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{len(checked)} checked, {len(failed)} failed, {skipped} skipped")
    if not checked:
        print(f"{options.directory}: no vector file to check; known are {', '.join(sorted(CHECKERS))}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
