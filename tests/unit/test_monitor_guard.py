"""When a fall of a monitor reward counts."""

import random

import pytest
from headwater_trainer.monitor_guard import MonitorGuard


def falls(train, monitor, *, steps=60, noise=0.01, window=5):
    """(step, good step) of each fall that is told, for rewards that follow `train(step)` and `monitor(step)`."""
    guard, rng, told = MonitorGuard(["other"], window=window, deviations=3.0), random.Random(0), []
    for step in range(1, steps + 1):
        values = {"reward/mean": train(step), "reward/other/mean": monitor(step) + rng.gauss(0, noise)}
        if (fall := guard.observe(step, values)) is not None:
            told.append((step, fall.good_step))
    return told


def peak(step):
    return 0.5 - 0.02 * abs(step - 20)


def test_a_monitor_that_falls_while_the_train_reward_rises_is_told_once_with_the_best_step():
    ((step, good),) = falls(lambda step: 0.01 * step, peak)
    assert 20 <= good <= 24
    assert good + 5 <= step < 40


def test_a_new_best_makes_a_fall_count_again():
    assert (
        len(falls(lambda step: 0.01 * step, lambda step: peak(step if step < 40 else step - 22) * (1 + step / 20))) == 2
    )


@pytest.mark.parametrize(
    ("train", "monitor"),
    [
        (lambda step: -0.01 * step, peak),  # both fall: not hacking
        (lambda step: 0.01 * step, lambda step: 0.5),  # noise
        (lambda step: 0.01 * step, lambda step: 0.01 * step),
    ],
)
def test_nothing_else_is_told(train, monitor):
    assert falls(train, monitor) == []


def test_steps_without_the_monitor_do_not_count():
    guard = MonitorGuard(["other"], window=2, deviations=3.0)
    assert all(guard.observe(step, {"reward/mean": float(step)}) is None for step in range(9))
