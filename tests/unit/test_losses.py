import pytest
import torch

from headwater.diffusion.losses import (
    TrustRegion,
    awm_log_likelihood,
    dpo_loss,
    flow_grpo_loss,
    kl_to_reference,
    mean_per_sample,
    nft_loss,
)


def loss_at(difference, advantage, clip=0.1):
    new = torch.tensor([difference], requires_grad=True)
    outcome = flow_grpo_loss(new, torch.zeros(1), torch.tensor([advantage]), clip_range=clip, adv_clip=5.0)
    outcome.loss.sum().backward()
    return outcome, new.grad.item()


@pytest.mark.parametrize(
    ("difference", "advantage", "moves"),
    [(0.2, 1.0, False), (0.2, -1.0, True), (-0.2, 1.0, True), (-0.2, -1.0, False), (0.0, 1.0, True)],
)
def test_the_clip_stops_only_moves_that_go_further_away(difference, advantage, moves):
    _, gradient = loss_at(difference, advantage)
    assert (gradient != 0) == moves


def test_clip_fractions_are_kept_apart():
    up, _ = loss_at(0.2, 1.0)
    down, _ = loss_at(-0.2, 1.0)
    assert (up.clipped_up.item(), up.clipped_down.item()) == (True, False)
    assert (down.clipped_up.item(), down.clipped_down.item()) == (False, True)


def test_advantages_are_clamped():
    outcome, _ = loss_at(0.0, 100.0)
    assert outcome.loss.item() == -5.0


def test_equal_policies_have_a_ratio_of_one_and_no_kl():
    outcome, gradient = loss_at(0.0, 2.0)
    assert outcome.ratio.item() == 1.0
    assert outcome.approx_kl.item() == 0.0
    assert gradient == -2.0


def test_kl_to_reference_is_per_sample_and_leaves_the_reference_alone():
    mean = torch.zeros(2, 3, requires_grad=True)
    reference = torch.stack([torch.full((3,), 1.0), torch.full((3,), 2.0)]).requires_grad_()
    kl = kl_to_reference(mean, reference, torch.full((2, 1), 0.5))
    assert kl.tolist() == [2.0, 8.0]
    kl.sum().backward()
    assert reference.grad is None
    assert mean.grad is not None


def nft_at(velocity, advantage, old=0.0):
    """At sigma 1 and x0 = 0, noise = 1: the true velocity is 1."""
    new = torch.full((1, 3), velocity, requires_grad=True)
    ones, zeros = torch.ones(1, 3), torch.zeros(1, 3)
    outcome = nft_loss(
        new, torch.full((1, 3), old), ones, zeros, torch.ones(1), torch.tensor([advantage]), beta=1.0, adv_clip=5.0
    )
    outcome.loss.sum().backward()
    return outcome, new.grad[0, 0].item()


@pytest.mark.parametrize(("advantage", "direction"), [(2.0, -1), (0.0, 0), (-2.0, 1)])
def test_nft_moves_towards_good_samples_and_away_from_bad_ones(advantage, direction):
    _, gradient = nft_at(0.0, advantage)
    assert (gradient > 1e-6) - (gradient < -1e-6) == direction


@pytest.mark.parametrize(("advantage", "share"), [(9.0, 1.0), (5.0, 1.0), (2.5, 0.75), (0.0, 0.5), (-9.0, 0.0)])
def test_the_optimality_of_nft_is_the_clamped_advantage(advantage, share):
    assert nft_at(0.3, advantage)[0].optimality.item() == share


def test_an_nft_error_of_zero_gives_no_infinity():
    outcome, gradient = nft_at(1.0, 5.0, old=1.0)
    assert outcome.loss.item() == 0.0
    assert gradient == 0.0


def test_the_mean_per_sample_is_over_all_other_dimensions():
    assert mean_per_sample(torch.arange(12.0).view(2, 2, 3)).tolist() == [2.5, 8.5]


def test_an_awm_weighting_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="use one of uniform, linear, quadratic, ghuber"):
        awm_log_likelihood(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1), "cubic")


def test_dpo_begins_undecided_and_lowers_the_error_of_the_preferred_latent():
    error = torch.tensor([0.5, 0.7], requires_grad=True)
    outcome = dpo_loss(error, error.detach().clone(), beta=4.0)
    outcome.loss.sum().backward()
    assert outcome.margin.item() == 0.0
    assert outcome.loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert error.grad.tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("difference", "advantage", "divergence", "moves"),
    [
        (0.2, 1.0, 0.3, False),
        (0.2, 1.0, 0.1, True),  # within the region the ratio may be anything
        (0.2, -1.0, 0.3, True),
        (-0.2, -1.0, 0.3, False),
        (-0.2, 1.0, 0.3, True),
    ],
)
def test_a_trust_region_stops_only_moves_that_go_further_away(difference, advantage, divergence, moves):
    new, trust = torch.tensor([difference], requires_grad=True), TrustRegion(torch.tensor([divergence]), 0.2)
    given = (new, torch.zeros(1), torch.tensor([advantage]))
    flow_grpo_loss(*given, clip_range=0.01, adv_clip=5.0, trust=trust).loss.sum().backward()
    assert (new.grad.item() != 0) == moves
