"""The checkers of golden vectors, one function for each file: see `golden`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.diffusion.advantages import AdvantageRule, advantages
from headwater.diffusion.decay import OLD_POLICY_DECAYS, ema_decay, old_policy_decay
from headwater.diffusion.losses import (
    Guard,
    awm_log_likelihood,
    dpo_loss,
    flow_grpo_loss,
    kl_to_reference,
    mean_per_sample,
    nft_loss,
    step_divergence,
)
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
    velocity = tensor("model_output").requires_grad_()
    step = _recorded_step(case, tensor, "sde", velocity)
    guard = None
    if case["grpo_guard"]:
        bias = step_divergence(step.mean, tensor("prev_sample_mean_old"), step.std)
        sigmas, index = tensor("sigmas"), tensor("step_index")
        guard = Guard(bias, step.std.flatten(), sigmas[index] - sigmas[index + 1])
    outcome = flow_grpo_loss(
        step.log_prob(tensor("prev_sample")),
        tensor("log_prob_old"),
        tensor("advantage"),
        clip_range=case["clip_range"],
        adv_clip=case["adv_clip_max"],
        guard=guard,
    )
    loss = outcome.loss.mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    clipped = (outcome.clipped_up | outcome.clipped_down).float().mean()
    yield _relative(file, case, "ratio", outcome.ratio, tensor("ratio"), RATIO_REL)
    yield _relative(file, case, "loss", loss[None], tensor("loss"), REL)
    yield _relative(file, case, "grad_wrt_model_output", gradient, tensor("grad_wrt_model_output"), REL)
    yield _relative(file, case, "approx_kl", outcome.approx_kl.mean()[None], tensor("approx_kl"), REL)
    yield _relative(file, case, "clipfrac", clipped[None], tensor("clipfrac"), REL)


def check_nft_loss(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """DiffusionNFT: r, both parts, policy loss, KL, total and gradient."""
    velocity = tensor("pred_new").requires_grad_()
    outcome = nft_loss(
        velocity, tensor("pred_old"), tensor("xt"), tensor("x0"), tensor("t"), tensor("advantage"),
        beta=case["nft_beta"], adv_clip=case["adv_clip_max"], adaptive=case["adaptive_weight"],
    )  # fmt: skip
    kl = mean_per_sample((velocity - tensor("pred_ref")) ** 2)
    loss = outcome.loss.mean() + case["kl_beta"] * kl.mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    found = {
        "r": outcome.optimality,
        "positive_loss": outcome.positive,
        "negative_loss": outcome.negative,
        "policy_loss": outcome.loss.mean()[None],
        "kl": kl,
        "loss": loss[None],
        "grad_wrt_pred_new": gradient,
    }
    for field, value in found.items():
        yield _relative(file, case, field, value, tensor(field), REL)


_AWM_WEIGHTINGS = {"Uniform": "uniform", "t": "linear", "t**2": "quadratic", "ghuber": "ghuber"}


def check_awm_loss(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """Advantage-weighted matching: ratio, loss and gradient."""
    velocity = tensor("pred_new").requires_grad_()
    weighting = _AWM_WEIGHTINGS[case["weighting"]]
    new, old = (
        awm_log_likelihood(each, tensor("target"), tensor("sigma"), weighting, case["ghuber_power"])
        for each in (velocity, tensor("pred_old"))
    )
    outcome = flow_grpo_loss(
        new, old, tensor("advantage"), clip_range=case["clip_range"], adv_clip=case["adv_clip"]
    )  # fmt: skip
    loss = outcome.loss.mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    yield _relative(file, case, "ratio", outcome.ratio, tensor("ratio"), RATIO_REL)
    yield _relative(file, case, "loss", loss[None], tensor("loss"), REL)
    yield _relative(file, case, "grad_wrt_pred_new", gradient, tensor("grad_wrt_pred_new"), REL)


def check_dpo_loss(file: str, case: Case, tensor: Tensors) -> Iterator[Row]:
    """Diffusion-DPO: what is inside the sigmoid, loss and gradient."""
    velocity = tensor("pred").requires_grad_()
    error, reference = (mean_per_sample((each - tensor("target")) ** 2) for each in (velocity, tensor("pred_ref")))
    outcome = dpo_loss(error, reference, beta=case["beta"])
    loss = outcome.loss.mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    yield _relative(file, case, "inside_term", outcome.margin, tensor("inside_term"), REL)
    yield _relative(file, case, "loss", loss[None], tensor("loss"), REL)
    yield _relative(file, case, "grad_wrt_pred", gradient, tensor("grad_wrt_pred"), REL)


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
    if case["schedule"] == "ema_decay_cap":
        found = ema_decay(case["step"], case["max_decay"])
    else:
        found = old_policy_decay(list(OLD_POLICY_DECAYS)[case["decay_type"]], case["step"])
    yield _row(file, case, "decay", abs(found - case["decay"]), 0.0)


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


CHECKERS: Mapping[str, Callable[[str, Case, Tensors], Iterator[Row]]] = {
    "sde_step": check_sde_step,
    "flow_grpo_loss": check_flow_grpo_loss,
    "nft_loss": check_nft_loss,
    "awm_loss": check_awm_loss,
    "dpo_loss": check_dpo_loss,
    "advantages": check_advantages,
    "ocr_reward": check_ocr_reward,
    "decay_schedules": check_decay_schedules,
}
