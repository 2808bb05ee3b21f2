"""Pairs of the forward process: which noise levels, and which noise."""

from collections import Counter

import pytest
import torch
from headwater_trainer.forward_pairs import draw_steps, forward_pairs, seed_of, stack
from headwater_trainer.pairs import Recorded

from headwater.common.v1.sample_pb2 import Sample, SampleId, ScoredGroup
from headwater.errors import DataLoss

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
X0 = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))


def pairs(index=0, *, group="g1", count=2, seed=(0, 0), latents=None):
    recorded = Recorded(
        latents={4: X0} if latents is None else latents,
        timesteps=1000 * SIGMAS,
        sigmas=SIGMAS,
        log_probs=torch.zeros(0),
        positive={"text": torch.ones(2)},
        negative={"text": torch.zeros(2)},
    )
    sample = Sample(id=SampleId(index=index))
    return list(forward_pairs(ScoredGroup(group_id=group), sample, recorded, count=count, seed=seed))


def test_levels_are_drawn_without_repetition_and_without_the_last():
    for count in (1, 3, 4):
        found = pairs(count=count)
        sigmas = [pair.sigma for pair in found]
        assert len(sigmas) == count
        assert sigmas == sorted(set(sigmas), reverse=True)
        assert set(sigmas) <= set(SIGMAS[:-1].tolist())
        assert [pair.timestep for pair in found] == pytest.approx([1000 * sigma for sigma in sigmas])
    assert len(pairs(count=9)) == 4  # a grid shorter than the recipe's


def test_every_level_is_drawn_about_equally_often():
    counts = Counter(step for index in range(400) for step in draw_steps(4, 1, seed_of(0, "g", index)))
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 70


def test_draws_follow_from_seed_step_group_and_sample_alone():
    def drawn(**changes):
        return stack(pairs(**{"count": 4, **changes}), 1.0, torch.device("cpu")).latent

    base = drawn()
    torch.manual_seed(99)  # the process's own state has no say
    assert torch.equal(drawn(), base)
    for changes in ({"seed": (1, 0)}, {"seed": (0, 1)}, {"group": "g2"}, {"index": 1}):
        assert not torch.allclose(drawn(**changes), base)
    choices = {tuple(pair.step for pair in pairs(index)) for index in range(20)}
    assert len(choices) > 2


def test_a_batch_is_the_forward_process_whatever_it_is_made_of():
    found = pairs(count=4)
    batch = stack(found, 1.0, torch.device("cpu"))
    noise = (batch.latent - (1 - batch.sigma.view(-1, 1, 1, 1)) * X0) / batch.sigma.view(-1, 1, 1, 1)
    assert noise[0].std() > 0.3  # sigma 1: nothing of x0 is left
    assert torch.equal(batch.latent[0], noise[0])
    assert not torch.allclose(noise[0], noise[1], atol=1e-3)  # fresh at each level
    assert torch.equal(batch.x0[3], X0)
    single = stack([found[2]], 1.0, torch.device("cpu"))
    assert torch.equal(single.latent[0], batch.latent[2])


def test_the_loss_is_free_of_guidance():
    assert all(pair.negative == {} for pair in pairs())


def test_a_trajectory_without_its_final_latent_is_refused():
    with pytest.raises(DataLoss, match="the final latent is not stored"):
        pairs(latents={3: X0})
