"""Recipes: what is accepted, what is refused, and with which words."""

from pathlib import Path

import pytest

from headwater.common.v1.sampling_pb2 import TransitionKind
from headwater.config.load import dump_toml, load_recipe, parse_recipe
from headwater.config.prompts import load_prompts
from headwater.config.recipe import PromptsSection, Recipe, Section
from headwater.errors import InvalidArgument, NotFound

RECIPES = Path(__file__).parents[2] / "recipes"
MINIMAL = """
[model]
path = "models/tiny"
[prompts]
texts = ["a red circle"]
[[rewards]]
name = "color_shape"
[train]
steps = 2
groups_per_step = 2
group_size = 4
"""


def minimal(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    return load_recipe(path, overrides)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_recipes_in_the_box_load(path):
    load_recipe(path, ["model.path=some/model"])


def test_dump_and_parse_is_the_identity(tmp_path):
    recipe = minimal(tmp_path, "lora.rank=4", "sampling.window_size=2", "rewards.0.params={color_weight=0.5}")
    assert parse_recipe(dump_toml(recipe)) == recipe


def test_overrides_are_toml_typed_and_plain_text_is_a_string(tmp_path):
    recipe = minimal(
        tmp_path, "optimizer.lr=1e-3", "optimizer.betas=[0.8, 0.9]", "model.path=m/sd3", "rewards.0.weight=2",
        "run.deterministic=true", "lora.rank=8",
    )  # fmt: skip
    assert recipe.optimizer.lr == 1e-3
    assert recipe.optimizer.betas == [0.8, 0.9]
    assert recipe.model.path == "m/sd3"
    assert recipe.rewards[0].weight == 2.0
    assert recipe.run.deterministic
    assert recipe.lora is not None
    assert recipe.lora.rank == 8


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("train.step=3", "train.step", "'train.steps'"),
        ("window_size=3", "window_size", "'sampling.window_size'"),
        ("optimiser.lr=3", "optimiser", "'optimizer"),
        ("lora.rnk=4", "lora.rnk", "'lora.rank'"),
        ("rewards.0.rol=x", "rewards.0.rol", "'rewards.N.role'"),
        ("rewards.3.name=x", "rewards.3.name", "list of 1"),
        ("train.steps.y=1", "train.steps.y", "'train.steps'"),
        ("train", "train", "section.key=value"),
        ("train.steps=many", "train.steps", "'many'"),
        ("train.steps=2.5", "train.steps", "2.5"),
        ("train.steps=true", "train.steps", "True"),
        ("train.updates_per_batch=3", "train.updates_per_batch", "must divide"),
        ("train.group_size=1", "train.group_size", "no variance"),
        ("optimizer.lr=inf", "optimizer.lr", "finite"),
        ("optimizer.lr=-1.0", "optimizer.lr", "greater than 0"),
        ("sampling.window_size=11", "sampling.window_size", "schedule of 10 steps"),
        ("sampling.window_end=3", "sampling.window_end", "needs sampling.window_size"),
        ("sampling.noise_level=0.0", "sampling.noise_level", "no randomness"),
        ("sampling.noise_level=nan", "sampling.noise_level", "finite"),
        ("sampling.height_px=0", "sampling.height_px", "greater than or equal to 1"),
        ("sampling.transition=ddim", "sampling.transition", "'sde', 'cps', 'dance' or 'ode'"),
        ("sampling.transition=ode", "sampling.transition", "no log-probability"),
        ("sampling.step_strategy=sliding", "sampling.window_size", "is missing"),
        ("sampling.step_strategy=random_steps", "sampling.random_count", "is missing"),
        ("sampling.random_count=2", "sampling.random_count", "no use for it"),
        ("sampling.window_stride=2", "sampling.window_stride", "no use for it"),
        ("sampling={step_strategy='all', window_size=2}", "sampling.window_size", "no use for it"),
        ("sampling={step_strategy='sliding', window_size=10}", "sampling.window_size", "schedule of 10 steps"),
        ("sampling={step_strategy='random_steps', random_count=10}", "sampling.random_count", "9 steps to draw from"),
        (
            "sampling={step_strategy='random_steps', random_count=1, random_candidates=[3, 10]}",
            "sampling.random_candidates",
            "below sampling.steps = 10",
        ),
        (
            "sampling={transition='cps', step_strategy='random_steps', random_count=1, random_candidates=[3, 9]}",
            "sampling.random_candidates",
            "std of 0",
        ),
        ("monitor.on_fall=rollback", "monitor.on_fall", "role 'monitor'"),
        ("monitor.window=1", "monitor.window", "greater than or equal to 2"),
        ("prompts.texts=[]", "prompts.texts", "at least one"),
        ("prompts.path=x.txt", "prompts.path", "exactly one"),
        ("rewards.0.role=monitor", "rewards", "role 'train'"),
        ("rewards.0.failure_policy=drop_reward", "rewards.failure_policy", "cannot use"),
        ("filters=['best']", "filters.0", "zero_variance"),
        ("rewards=[]", "rewards", "at least 1"),
        ("objective.guard=true", "objective.guard", "recompute_old_log_prob"),
        ("objective.dppo_threshold=0.1", "objective.dppo_threshold", "recompute_old_log_prob"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, override, field, words):
    with pytest.raises(InvalidArgument) as e:
        minimal(tmp_path, override)
    assert e.value.field == field
    assert words in e.value.message


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("sampling.transition=cps", "sampling.transition", "read by flow_grpo"),
        ("sampling.noise_level=0.5", "sampling.noise_level", "no use for sampling.noise_level"),
        ("sampling.window_size=2", "sampling.window_size", "leave it out"),
        ("objective.clip_range=1e-3", "objective.clip_range", "objective 'nft' has no use"),
        ("objective.recompute_old_log_prob=true", "objective.recompute_old_log_prob", "read by flow_grpo"),
        ("objective.sigma_distribution=logit_normal", "objective.sigma_distribution", "read by sft"),
        ("ema.max_decay=0.9", "ema", "set objective.kl_reference"),
        ("objective.weighting=ghuber", "objective.weighting", "read by awm"),
        ("objective.kl_reference=ema", "objective.kl_reference", "add [ema]"),
        ("objective.sigmas_per_sample=11", "objective.sigmas_per_sample", "sampling.steps = 10"),
        ("objective.sigmas_per_sample=0", "objective.sigmas_per_sample", "greater than or equal to 1"),
        ("objective.beta=0.0", "objective.beta", "greater than 0"),
        ("objective.old_decay=fast", "objective.old_decay", "'late_ramp'"),
        ("rewards=[]", "rewards", "at least 1"),
    ],
)
def test_nft_refuses_what_it_has_no_use_for(tmp_path, override, field, words):
    with pytest.raises(InvalidArgument) as e:
        minimal(tmp_path, "objective.name=nft", override)
    assert e.value.field == field
    assert words in e.value.message


@pytest.mark.parametrize("key", ["objective.beta=0.5", "objective.old_decay=zero", "objective.sigmas_per_sample=2"])
def test_keys_of_nft_are_refused_elsewhere(tmp_path, key):
    with pytest.raises(InvalidArgument, match="objective 'flow_grpo' has no use"):
        minimal(tmp_path, key)


def test_a_kl_to_a_moving_average_needs_a_weight_and_the_average(tmp_path):
    wanted = ["objective.name=awm", "objective.kl_reference=ema", "ema.max_decay=0.9"]
    with pytest.raises(InvalidArgument, match=r"objective.kl_coef is 0") as e:
        minimal(tmp_path, *wanted)
    assert e.value.field == "objective.kl_coef"
    recipe = minimal(tmp_path, *wanted, "objective.kl_coef=0.1", "objective.clip_range=1e-3")
    assert not recipe.objective.needs_initial_policy
    assert not recipe.rollout_sampling().HasField("transition")


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("objective.kl_coef=0.1", "objective.kl_coef", "read by flow_grpo, nft, awm"),
        ("objective.beta=0.1", "objective.beta", "read by nft"),
        ("objective.combine=gdpo", "objective.combine", "no use"),
        ("objective.pairs_per_group=3", "objective.pairs_per_group", "at most 2 pairs"),
        ("filters=[]", "filters", "zero_variance"),
        ("ema.max_decay=0.9", "ema", "no use for ema"),
    ],
)
def test_dpo_refuses_what_it_has_no_use_for(tmp_path, override, field, words):
    assert minimal(tmp_path, "objective.name=dpo").objective.needs_initial_policy
    with pytest.raises(InvalidArgument) as e:
        minimal(tmp_path, "objective.name=dpo", override)
    assert e.value.field == field
    assert words in e.value.message


def test_nft_rolls_out_by_the_ode_also_in_one_step_and_survives_being_written_out(tmp_path):
    recipe = minimal(tmp_path, "objective.name=nft", "sampling.steps=1", "objective.kl_coef=0.1")
    assert not recipe.rollout_sampling().HasField("transition")
    assert parse_recipe(dump_toml(recipe)) == recipe
    assert minimal(tmp_path).rollout_sampling().HasField("transition")


def test_guard_refuses_log_probs_that_its_bias_does_not_fit(tmp_path):
    wanted = ["objective.guard=true", "objective.recompute_old_log_prob=true"]
    minimal(tmp_path, *wanted)
    for override, words in (("objective.log_prob_reduction=sum", "'mean'"), ("sampling.transition=cps", "'dance'")):
        with pytest.raises(InvalidArgument, match=words) as e:
            minimal(tmp_path, *wanted, override)
        assert e.value.field == "objective.guard"


def test_cps_must_leave_the_last_step_out(tmp_path):
    cps = ["sampling.transition=cps", "sampling.window_size=2"]
    minimal(tmp_path, *cps)
    with pytest.raises(InvalidArgument) as e:
        minimal(tmp_path, *cps, "sampling.window_begin=8", "sampling.window_end=10")
    assert e.value.field == "sampling.window_end"


def test_a_missing_key_names_itself_and_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(InvalidArgument, match=r"model\.path is missing"):
        parse_recipe(MINIMAL.replace('path = "models/tiny"', ""))
    with pytest.raises(NotFound, match="there is no recipe"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(InvalidArgument, match="line 1"):
        parse_recipe("= 3")


def test_protos_carry_the_recipe(tmp_path):
    recipe = minimal(tmp_path, "sampling.window_size=3", "sampling.transition=dance", "sampling.flow_shift=2.0")
    params = recipe.sampling.to_proto()
    assert params.transition.kind == TransitionKind.TRANSITION_KIND_DANCE
    assert params.transition.window.size == 3
    assert not params.transition.window.HasField("range_end")
    ode = recipe.sampling.to_ode_proto()
    assert not ode.HasField("transition")
    assert ode.flow_shift == 2.0
    spec = (
        minimal(tmp_path, "rewards.0.params={target='red'}", "rewards.0.failure_policy=fail_run").rewards[0].to_proto()
    )
    assert spec.params["target"] == "red"
    assert spec.weight == 1.0


def steps_of(recipe, round_number):
    return list(recipe.rollout_sampling(round_number).transition.explicit_steps.steps)


def test_random_steps_are_drawn_once_per_round_from_the_candidates(tmp_path):
    wanted = ["sampling.step_strategy=random_steps", "sampling.random_count=2", "sampling.random_candidates=[0,2,4,6]"]
    recipe, other = minimal(tmp_path, *wanted), minimal(tmp_path, *wanted, "run.seed=1")
    drawn = [tuple(steps_of(recipe, number)) for number in range(40)]
    assert all(a < b and {a, b} <= {0, 2, 4, 6} for a, b in drawn)
    assert len(set(drawn)) == 6
    assert drawn == [tuple(steps_of(recipe, number)) for number in range(40)]
    assert drawn != [tuple(steps_of(other, number)) for number in range(40)]


def test_a_sliding_window_visits_all_places_and_begins_again(tmp_path):
    wanted = ["sampling.step_strategy=sliding", "sampling.window_size=2", "sampling.window_end=7"]
    recipe = minimal(tmp_path, *wanted, "sampling.window_every=3", "sampling.window_stride=2")
    starts = [steps_of(recipe, number)[0] for number in range(15)]
    assert starts == [0, 0, 0, 2, 2, 2, 4, 4, 4, 5, 5, 5, 0, 0, 0]
    assert steps_of(recipe, 9) == [5, 6]


def test_every_field_has_a_docstring():
    fields = [
        (section, name, info) for section in Section.__subclasses__() for name, info in section.model_fields.items()
    ]
    assert len(fields) > 40
    assert [f"{section.__name__}.{name}" for section, name, info in fields if not info.description] == []


def test_prompt_files(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a red circle", "metadata": {"shape": "circle"}}\n\n{"prompt": "b"}\n'
    )
    (tmp_path / "p.txt").write_text("a red circle\n\n  a sign \n")
    items = load_prompts(PromptsSection(path=str(tmp_path / "p.jsonl")))
    assert [(i.text, dict(i.metadata)) for i in items] == [("a red circle", {"shape": "circle"}), ("b", {})]
    assert [i.text for i in load_prompts(PromptsSection(path=str(tmp_path / "p.txt")))] == ["a red circle", "a sign"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InvalidArgument, match=r"p\.jsonl:2"):
        load_prompts(PromptsSection(path=str(tmp_path / "p.jsonl")))


def test_a_relative_prompt_file_is_found_beside_the_recipe(tmp_path):
    (tmp_path / "words.txt").write_text("a red circle\n")
    recipe = tmp_path / "r.toml"
    recipe.write_text(MINIMAL.replace('texts = ["a red circle"]', 'path = "words.txt"'))
    assert load_recipe(recipe).prompts.path == str(tmp_path / "words.txt")
