import numpy as np
import pytest

from headwater.diffusion.advantages import AdvantageRule, advantages, combined_advantages, zero_variance_share


def test_each_group_is_centred_and_scaled_by_its_own_std():
    found = advantages([1.0, 10.0, 3.0, 30.0], ["a", "b", "a", "b"])
    assert found == pytest.approx([-1 / (1 + 1e-4), -10 / (10 + 1e-4), 1 / (1 + 1e-4), 10 / (10 + 1e-4)])


def test_sample_std_is_larger_than_population_std():
    population = advantages([0.0, 1.0], "aa", AdvantageRule(ddof=0))
    sample = advantages([0.0, 1.0], "aa", AdvantageRule(ddof=1))
    assert population[1] / sample[1] == pytest.approx(np.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("rule", [AdvantageRule(), AdvantageRule(ddof=1), AdvantageRule(global_std=True)])
def test_a_single_sample_is_not_divided(rule):
    assert advantages([5.0], ["a"], rule).tolist() == [0.0]


def test_without_normalisation_only_the_mean_is_removed():
    assert advantages([1.0, 5.0], "aa", AdvantageRule(std_normalization=False)).tolist() == [-2.0, 2.0]


def test_a_zero_variance_group_has_zero_advantages():
    assert advantages([0.7, 0.7, 0.7], "aaa") == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)
    assert zero_variance_share([0.7, 0.7, 0.1, 0.2], "aabb") == 0.5


def test_weighted_sum_adds_raw_rewards():
    rewards = {"x": [0.0, 1.0], "y": [1.0, 0.0]}
    assert combined_advantages(rewards, {"x": 1.0, "y": 1.0}, "aa", AdvantageRule()).tolist() == [0.0, 0.0]


def test_gdpo_does_not_let_a_large_scale_drown_a_small_one():
    rewards = {"large": [0.0, 100.0, 0.0, 100.0], "small": [0.0, 0.0, 0.01, 0.01]}
    weights = {"large": 1.0, "small": 1.0}
    summed = combined_advantages(rewards, weights, "aaaa", AdvantageRule())
    gdpo = combined_advantages(rewards, weights, "aaaa", AdvantageRule(combine="gdpo"))
    assert abs(summed[1] - summed[3]) < 1e-3
    assert gdpo[3] - gdpo[1] == pytest.approx(gdpo[1] - gdpo[0], rel=0.02)
    assert gdpo.std() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_an_error_naming_the_sample(bad):
    with pytest.raises(ValueError, match="ocr of sample 1"):
        combined_advantages({"ocr": [0.0, bad]}, {"ocr": 1.0}, "aa", AdvantageRule())


def test_a_reward_without_a_weight_is_an_error():
    with pytest.raises(ValueError, match="'ocr' has no weight"):
        combined_advantages({"ocr": [0.0, 1.0]}, {}, "aa", AdvantageRule())
