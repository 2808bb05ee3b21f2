import math

import pytest
import torch

from headwater.diffusion.schedules import schedule
from headwater.diffusion.transitions import grid_transition, transition

# Computed by hand for x = 1, v = 0.5, eta, sigma after the first = 0.9, next latent 0.9.
HAND_SDE = [
    (1.0, 0.9, 2.213594, 0.705000, 0.700000, -0.601065),
    (0.8, 0.7, 1.400000, 0.815250, 0.442719, -0.122441),
    (0.1, 0.0, 0.233333, 0.910528, 0.073786, 1.677463),
]
HAND_CPS = [(1.0, 0.9, 0.328115, -0.327052), (0.8, 0.7, 0.417943, -0.232379)]


def one_pixel(kind, sigma, next_sigma, noise_level):
    x, v = torch.ones(1, 1), torch.full((1, 1), 0.5)
    return transition(
        kind, x, v, sigma=sigma, next_sigma=next_sigma, sigma_after_first=0.9, noise_level=noise_level
    )  # fmt: skip


@pytest.mark.parametrize(("sigma", "next_sigma", "scale", "mean", "std", "log_prob"), HAND_SDE)
def test_sde_matches_values_computed_by_hand(sigma, next_sigma, scale, mean, std, log_prob):
    step = one_pixel("sde", sigma, next_sigma, 0.7)
    found = [step.noise_scale.item(), step.mean.item(), step.std.item(), step.log_prob(torch.full((1, 1), 0.9)).item()]
    assert found == pytest.approx([scale, mean, std, log_prob], abs=1.5e-6)


@pytest.mark.parametrize(("sigma", "next_sigma", "mean", "log_prob"), HAND_CPS)
def test_cps_matches_values_computed_by_hand(sigma, next_sigma, mean, log_prob):
    step = one_pixel("cps", sigma, next_sigma, 0.8)
    assert [step.mean.item(), step.log_prob(torch.full((1, 1), 0.9)).item()] == pytest.approx(
        [mean, log_prob], abs=1e-6
    )


def test_dance_has_a_constant_scale_and_the_sde_drift_of_that_scale():
    x, v, eta, sigma, dt = 1.0, 0.5, 0.3, 0.8, -0.1
    step = one_pixel("dance", 0.8, 0.7, eta)
    clean = x - sigma * v
    expected = x + (v + 0.5 * eta**2 * (x - clean * (1 - sigma)) / sigma**2) * dt
    assert step.mean.item() == pytest.approx(expected, abs=1e-6)
    assert step.std.item() == pytest.approx(eta * math.sqrt(0.1), abs=1e-6)


def test_sum_is_mean_times_the_number_of_dimensions():
    torch.manual_seed(0)
    sigmas = schedule({"shift": 3.0}, 10).sigmas
    x, v, y = torch.randn(3, 2, 4, 4, 4).unbind(0), torch.randn(2, 4, 4, 4), torch.randn(2, 4, 4, 4)
    step = grid_transition("sde", x[0], v, sigmas=sigmas, step=3, noise_level=0.7)
    torch.testing.assert_close(step.log_prob(y, "sum"), step.log_prob(y, "mean") * 64)


@pytest.mark.parametrize("kind", ["sde", "cps", "dance", "ode"])
def test_a_sample_does_not_depend_on_the_batch_it_is_in(kind):
    torch.manual_seed(0)
    sigmas = schedule({"shift": 3.0}, 10).sigmas
    x, v, noise = torch.randn(3, 33, 4, 8, 8).unbind(0)
    steps = torch.arange(33) % 9
    batch = transition(
        kind, x, v, sigma=sigmas[steps], next_sigma=sigmas[steps + 1], sigma_after_first=sigmas[1], noise_level=0.7
    )  # fmt: skip
    drawn = batch.sample_next(noise)
    for i, step in enumerate(steps.tolist()):
        row = slice(i, i + 1)
        alone = grid_transition(kind, x[row], v[row], sigmas=sigmas, step=step, noise_level=0.7)
        assert torch.equal(alone.sample_next(noise[row]), drawn[row])
        if kind != "ode":
            assert torch.equal(alone.log_prob(drawn[row]), batch.log_prob(drawn)[row])


def test_gradient_reaches_the_model_output():
    x, v = torch.randn(2, 4, 4), torch.randn(2, 4, 4, requires_grad=True)
    step = transition("sde", x, v, sigma=0.8, next_sigma=0.7, sigma_after_first=0.9, noise_level=0.7)
    step.log_prob(torch.randn(2, 4, 4)).sum().backward()
    assert v.grad is not None
    assert v.grad.abs().min() > 0


def test_ode_has_no_log_prob():
    step = one_pixel("ode", 0.8, 0.7, 0.0)
    with pytest.raises(ValueError, match="deterministic"):
        step.log_prob(torch.ones(1, 1))


def test_unknown_transition_names_the_known_ones():
    with pytest.raises(ValueError, match="sde, dance, cps, ode"):
        one_pixel("euler", 0.8, 0.7, 0.7)


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        one_pixel("sde", 0.8, 0.7, 0.7).log_prob(torch.ones(1, 1), "max")
