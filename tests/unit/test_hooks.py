"""Code that a recipe names: what is allowed, and that it is used."""

import pytest
from headwater_trainer.feeder import Feeder
from headwater_trainer.hooks import load_hooks
from headwater_trainer.objectives.awm import Awm
from headwater_trainer.prompt_order import PromptOrder
from headwater_trainer.service import check_request
from headwater_trainer.stream_source import StreamSource

from headwater.common.v1.sample_pb2 import Sample, SampleId, ScoredGroup, WeightVersion
from headwater.config.load import parse_recipe
from headwater.config.prompts import PromptItem
from headwater.config.recipe import HooksSection
from headwater.diffusion import tiny_sd3
from headwater.errors import InvalidArgument
from headwater.stream.scored import Entry
from headwater.trainer.v1.trainer_pb2 import StartRunRequest

RECIPE = """
[model]
path = "m"
[prompts]
texts = ["a red circle"]
[[rewards]]
name = "color_shape"
[train]
steps = 9
groups_per_step = 1
group_size = 2
"""
OWN = "headwater_trainer.objectives.awm:Awm"


def every_other(round_number, seed):
    return [round_number + seed, round_number + seed + 2]


def no_second_group(group):
    return "I do not like it" if group.group_id == "g00000001" else ""


def test_code_of_a_package_that_the_trainer_allows_is_loaded():
    assert load_hooks(HooksSection(objective=OWN), ["headwater_trainer"]).objective is Awm
    assert load_hooks(HooksSection(), []).objective is None


@pytest.mark.parametrize(
    ("value", "allowed", "words"),
    [
        (OWN, [], "start the trainer with --allow-hooks headwater_trainer"),
        ("os:system", ["headwater_trainer"], "--allow-hooks os"),
        ("headwater_trainer.nothing:x", ["headwater_trainer"], "cannot be imported"),
        ("headwater_trainer.config:nothing", ["headwater_trainer"], "cannot be imported"),
        ("headwater_trainer.config:__name__", ["headwater_trainer"], "cannot be called"),
        ("mine", ["headwater_trainer"], "no entry point"),
    ],
)
def test_anything_else_is_refused(value, allowed, words):
    with pytest.raises(InvalidArgument) as e:
        load_hooks(HooksSection(filter=value), allowed)
    assert e.value.field == "hooks.filter"
    assert words in e.value.message


def test_a_run_with_code_that_is_not_allowed_does_not_start(tmp_path):
    model = tiny_sd3.build(tmp_path / "tiny-stable-diffusion-3-medium")
    text = (
        RECIPE.replace('"m"', f'"{model}"')
        + f'[sampling]\nheight_px = 64\nwidth_px = 64\n[hooks]\nobjective = "{OWN}"\n'
    )
    request = StartRunRequest(run_id="run", recipe_toml=text)
    with pytest.raises(InvalidArgument, match="--allow-hooks"):
        check_request(request, tmp_path)
    assert check_request(request, tmp_path, ["headwater_trainer"]).run_id == "run"


def test_steps_of_ones_own_are_submitted_and_checked():
    order = PromptOrder([PromptItem("a")], seed=0, shuffle=False)
    feeder = Feeder("127.0.0.1:1", "run", parse_recipe(RECIPE), order, lambda *_: None, steps=every_other)
    assert list(feeder._prompt(3).sampling.transition.explicit_steps.steps) == [3, 5]
    with pytest.raises(InvalidArgument, match="below steps = 10"):
        feeder._prompt(8)


def test_a_group_that_the_filter_does_not_want_is_replaced():
    forgotten, replaced = [], []
    source = StreamSource(
        parse_recipe(RECIPE), "run", None, None, None, None, asked=lambda: None, idle=lambda: None,
        notice=lambda *_: None, wait_limit_s=1.0, unwanted=no_second_group,
    )  # fmt: skip
    source._forget = lambda entries: forgotten.extend(entries)
    source._give_up = lambda group_ids, reason: replaced.append((group_ids, reason))
    groups = [
        ScoredGroup(
            group_id=f"g0000000{number}",
            samples=[Sample(id=SampleId(index=0), first_step_version=WeightVersion(run_id="run"))],
        )
        for number in range(3)
    ]
    source._accept([Entry(group.group_id, group) for group in groups])
    assert sorted(source._ready) == [0, 2]
    assert (forgotten, replaced) == ([1], [(["g00000001"], "I do not like it")])
