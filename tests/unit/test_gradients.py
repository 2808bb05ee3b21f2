"""The gradient of every objective against finite differences, in fp64, on a velocity model of two layers."""

from dataclasses import fields, replace

import pytest
import torch
from headwater_trainer.forward_pairs import ForwardBatch
from headwater_trainer.model import Policy
from headwater_trainer.objectives import make_objective
from headwater_trainer.objectives.sft import Sft, noisy
from headwater_trainer.preference_pairs import PreferenceBatch
from headwater_trainer.transition_pairs import TransitionBatch

from headwater.config.load import parse_recipe
from headwater.diffusion.losses import nft_loss
from headwater.diffusion.schedules import noised

PAIRS = 6
RECIPE = """
[model]
path = "m"
[prompts]
texts = ["a red circle"]
[[rewards]]
name = "color_shape"
[train]
steps = 1
[objective]
"""


class Toy(torch.nn.Module):
    """A velocity model of two layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4)).double()

    def forward(self, latent, sigma):
        return self.layers(torch.cat([latent, sigma[:, None]], 1))


class ToyFamily:
    def predict(self, module, latent, timestep, conditioning):
        return module(latent, timestep / 1000)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_policy():
    torch.manual_seed(0)
    return Policy(ToyFamily(), "toy", Toy(), Toy(), 1.0, False, torch.device("cpu"))


def common():
    sigma = torch.rand(PAIRS, dtype=torch.float64) * 0.8 + 0.1
    return {
        "timestep": 1000 * sigma, "sigma": sigma, "advantage": random(PAIRS),
        "weight": torch.ones(PAIRS), "positive": {}, "negative": {},
    }  # fmt: skip


def forward_batch():
    """Clean latents, noised; the old likelihoods are those of a policy some way off."""
    given, x0, noise = common(), random(PAIRS, 4), random(PAIRS, 4)
    latent = noised(x0, noise, given["sigma"])
    return ForwardBatch(latent=latent, x0=x0, target=noise - x0, log_likelihood_old=None, **given)


def transition_batch():
    given, sigma = common(), None
    sigma, old = given["sigma"], random(PAIRS)
    return TransitionBatch(
        latent=random(PAIRS, 4), next_latent=random(PAIRS, 4), next_sigma=0.8 * sigma,
        sigma_after_first=torch.full((PAIRS,), 0.95, dtype=torch.float64), log_prob_engine=old, log_prob_old=old,
        **given,
    )  # fmt: skip


def check(module, loss, *, numerically=None):
    """The gradient of `loss()` with respect to every parameter of `module`, against differences of `numerically()`."""
    module.zero_grad()
    loss().backward()
    loss = numerically or loss
    largest, rounding = 0.0, 1e-8 * max(1.0, abs(loss().item()))  # what the differences are uncertain by
    for parameter in module.parameters():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(len(flat)):
            value, ends = flat[i].item(), []
            for end in (value + 1e-6, value - 1e-6):
                flat[i] = end
                ends.append(loss().item())
            flat[i] = value
            assert gradient[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=rounding)
            largest = max(largest, abs(gradient[i].item()))
    assert largest > 1e-3  # something was compared


def near(policy, batch, name, of):
    """The batch with old values some way from the present ones, so that the ratio is clipped for some pairs."""
    with torch.no_grad():
        return replace(batch, **{name: of(policy.velocity(batch)) + 0.1 * random(PAIRS)})


@pytest.mark.parametrize("kl", ["", "kl_coef = 0.3\n"])
@pytest.mark.parametrize("weighting", ["uniform", "linear", "quadratic", "ghuber"])
def test_awm(weighting, kl):
    recipe = parse_recipe(RECIPE + f'name = "awm"\nclip_range = 0.1\nweighting = "{weighting}"\n{kl}')
    objective, policy, batch = make_objective(recipe), make_policy(), forward_batch()
    batch = near(policy, batch, "log_likelihood_old", lambda velocity: objective._log_likelihood(velocity, batch))
    clipped = objective.terms(policy, batch).means
    assert 0 < (clipped["clip_fraction/up"] + clipped["clip_fraction/down"]).sum() < PAIRS
    check(policy.module, lambda: objective.terms(policy, batch).loss.mean())
    assert all(parameter.grad is None for parameter in policy.reference_copy.parameters())


@pytest.mark.parametrize("kl", ["", "kl_coef = 0.3\n"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["sde", "dance", "cps"])
def test_flow_grpo(kind, reduction, kl):
    options = f'clip_range = 0.1\nlog_prob_reduction = "{reduction}"\n{kl}[sampling]\ntransition = "{kind}"\n'
    objective, policy, batch = make_objective(parse_recipe(RECIPE + options)), make_policy(), transition_batch()
    batch = near(
        policy, batch, "log_prob_old",
        lambda velocity: objective._step(batch, velocity).log_prob(batch.next_latent, "mean"),
    )  # fmt: skip
    check(policy.module, lambda: objective.terms(policy, batch).loss.mean())


@pytest.mark.parametrize("adaptive", [False, True])
def test_nft(adaptive):
    torch.manual_seed(0)
    new, old = Toy(), Toy()
    x0, noise = torch.randn(2, 6, 4, dtype=torch.float64).unbind()
    sigma, advantage = torch.rand(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    latent = noised(x0, noise, sigma)

    def outcome(adaptive):
        given = (new(latent, sigma), old(latent, sigma), latent, x0, sigma, advantage)
        return nft_loss(*given, beta=0.7, adv_clip=2.0, adaptive=adaptive)

    plain, found = outcome(False), outcome(adaptive)
    scale = (plain.positive / found.positive, plain.negative / found.negative)  # the adaptive weights: constants

    def loss():
        now, r = outcome(False), found.optimality
        return (2.0 * (r * now.positive / scale[0] + (1 - r) * now.negative / scale[1]) / 0.7).mean()

    torch.testing.assert_close(found.loss.mean(), loss())
    check(new, lambda: outcome(adaptive).loss.mean(), numerically=loss)
    assert all(parameter.grad is None for parameter in old.parameters())


@pytest.mark.parametrize("options", ["guard = true", "dppo_threshold = 0.02", "guard = true\ndppo_threshold = 0.02"])
@pytest.mark.parametrize("kind", ["sde", "dance"])
def test_flow_grpo_with_old_means(kind, options):
    text = f'clip_range = 0.1\nrecompute_old_log_prob = true\n{options}\n[sampling]\ntransition = "{kind}"\n'
    objective, policy, batch = make_objective(parse_recipe(RECIPE + text)), make_policy(), transition_batch()
    with torch.no_grad():
        step = objective._step(batch, policy.velocity(batch))
        old = replace(step, mean=step.mean + 0.2 * step.std * random(PAIRS, 4))
    batch = replace(batch, mean_old=old.mean, log_prob_old=old.log_prob(batch.next_latent))
    if "dppo" in options:
        assert 0 < objective.terms(policy, batch).means["divergence/left"].sum() < PAIRS
    check(policy.module, lambda: objective.terms(policy, batch).loss.mean())


@pytest.mark.parametrize("beta", [1.0, 30.0])
def test_dpo(beta):
    objective, policy = make_objective(parse_recipe(RECIPE + f'name = "dpo"\ndpo_beta = {beta}\n')), make_policy()
    batch = forward_batch()
    pairs = PreferenceBatch(
        **{field.name: getattr(batch, field.name) for field in fields(PreferenceBatch) if field.name != "weight"},
        weight=torch.ones(PAIRS // 2),
    )
    check(policy.module, lambda: objective.terms(policy, pairs).loss.mean())
    assert all(parameter.grad is None for parameter in policy.reference_copy.parameters())


def test_sft():
    recipe = parse_recipe(
        RECIPE.replace('[[rewards]]\nname = "color_shape"\n', '[data]\ngenerator = "synthetic"\n') + 'name = "sft"\n'
    )
    objective, policy = Sft(recipe, 1.0), make_policy()
    batch = noisy(random(PAIRS, 4), random(PAIRS, 4), torch.rand(PAIRS, dtype=torch.float64), {})
    check(policy.module, lambda: objective.losses(policy, batch).mean())


def test_the_toy_batches_are_fp64():
    for batch in (forward_batch(), transition_batch()):
        names = {field.name for field in fields(batch)} - {"positive", "negative", "weight"}
        tensors = [getattr(batch, name) for name in names]
        assert all(tensor is None or tensor.dtype == torch.float64 for tensor in tensors)
