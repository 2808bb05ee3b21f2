import pytest
import torch

from headwater.diffusion.schedules import schedule


@pytest.mark.parametrize("shift", [1.0, 2.7, 3.0, 5.0])
@pytest.mark.parametrize("steps", [1, 2, 10, 28, 50])
def test_grid_is_bit_equal_to_the_scheduler_of_diffusers(shift, steps):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    found = schedule(dict(scheduler.config), steps)
    assert torch.equal(found.sigmas, scheduler.sigmas)
    assert torch.equal(found.timesteps[:-1], scheduler.timesteps)
    assert found.timesteps[-1] == 0


def test_flow_shift_acts_like_set_shift():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_shift(4.5)
    scheduler.set_timesteps(12)
    assert torch.equal(schedule({"shift": 3.0}, 12, 4.5).sigmas, scheduler.sigmas)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting"),
        ({"_class_name": "UniPCMultistepScheduler"}, "UniPC"),
    ],
)
def test_other_grids_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        schedule(config, 10)


def test_zero_steps_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        schedule({}, 0)
