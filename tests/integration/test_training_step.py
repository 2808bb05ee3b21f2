"""Single steps on one rank in this process: data that cannot be used, numbers that are not finite, guidance."""

import json
import math

import pytest
import torch
from headwater_trainer.batch import assign_advantages, load_batch, split_groups, train_rewards
from headwater_trainer.checkpoint import Checkpoints, list_checkpoints
from headwater_trainer.groups import Cursor, GroupBatch, SharedSource, Signal
from headwater_trainer.model import load_policy
from headwater_trainer.objectives import make_objective
from headwater_trainer.optimizer import make_optimizer
from headwater_trainer.pairs import pairs_of
from headwater_trainer.ranks import RunFailed, join
from headwater_trainer.train import Hooks, Trainer, train
from headwater_trainer.transition_pairs import transitions
from recorded import make_groups
from safetensors.torch import load_file

from headwater.config.load import parse_recipe
from headwater.diffusion import families, tiny_sd3
from headwater.errors import DataLoss
from headwater.tensors import torch_codec
from headwater.tensors.blobs import BlobStore

RECIPE = """
[model]
path = "{model}"
[sampling]
steps = 5
height_px = 64
width_px = 64
window_size = 2
[prompts]
texts = ["a red circle"]
[[rewards]]
name = "first"
[train]
steps = {steps}
updates_per_batch = {updates}
groups_per_step = 2
group_size = 3
micro_batch_size = 3
[optimizer]
lr = 1e-2
"""
LORA = "[lora]\nrank = 2\nalpha = 4.0\n"


class OneBatch:
    """One batch, then whatever a test wants."""

    def __init__(self, groups):
        self.groups, self.failed = groups, {}

    def take(self, step):
        if isinstance(self.groups, Exception):
            raise self.groups
        return GroupBatch(self.groups, dropped=2)

    def fail(self, group_id, reason):
        self.failed[group_id] = reason

    def trained(self, step):
        pass

    def cursor(self):
        return Cursor()

    def settle(self):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def ranks():
    with join("cpu", 30.0) as joined:
        yield joined


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_sd3.build(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3-medium")


@pytest.fixture
def store(tmp_path):
    return BlobStore(str(tmp_path))


NFT = '[objective]\nname = "nft"\nkl_coef = 0.1\n'


AWM = '[objective]\nname = "awm"\nclip_range = 1e-3\nsigmas_per_sample = 2\n'
DPO = '[objective]\nname = "dpo"\nsigmas_per_sample = 2\n'
FINAL_ONLY = ('name = "nft"', 'name = "awm"', 'name = "dpo"')  # objectives that roll out by the ODE


def recipe_text(model, steps=1, updates_per_batch=1):
    return RECIPE.format(model=model, steps=steps, updates=updates_per_batch)


def make_trainer(text, model, store, ranks, change=lambda groups: None, *, steps=1, updates_per_batch=1):
    base = recipe_text(model, steps, updates_per_batch)
    base = base.replace("window_size = 2\n", "") if any(name in text for name in FINAL_ONLY) else base
    recipe = parse_recipe(base + text)
    groups = make_groups(recipe, store, "run", 2)
    change(groups)
    policy = load_policy(recipe, families.resolve(model), ranks)
    source, notices, reports = OneBatch(groups), [], []
    t = Trainer(
        recipe, policy, make_objective(recipe), make_optimizer(policy, recipe.optimizer), SharedSource(source, ranks),
        store.get, ranks,
        Hooks(notice=lambda reason, message: notices.append((reason, message)), report=lambda _, v: reports.append(v)),
    )  # fmt: skip
    return t, source, notices, reports


@pytest.mark.parametrize(
    ("text", "pairs"), [(LORA, 12), ("", 12), (NFT + LORA, 24), (NFT, 24), (AWM, 12), (DPO + LORA, 4), (DPO, 4)]
)
def test_a_step_changes_what_it_publishes_and_nothing_else(text, pairs, model, store, ranks):
    t, _, notices, reports = make_trainer(text, model, store, ranks)
    before_changed, before_all = t.policy.changed_weights(), t.policy.all_weights()
    original = families.resolve(model).load_component(model, "transformer", torch.float32).state_dict()
    assert before_all.keys() == {name for name in original if name != "pos_embed.pos_embed"}
    assert all(torch.equal(value, original[name]) for name, value in before_all.items())
    assert train(t)
    after_changed, after_all = t.policy.changed_weights(), t.policy.all_weights()
    changed = [name for name, value in before_changed.items() if not torch.equal(after_changed[name], value)]
    assert len(changed) > len(before_changed) / 2  # all but those that this model's output does not depend on
    untouched = before_all.keys() - before_changed.keys()
    assert bool(untouched) == (LORA in text)
    assert all(torch.equal(after_all[name], before_all[name]) for name in untouched)
    assert notices == []
    assert reports[0]["pairs"] == pairs
    assert reports[0]["groups/dropped"] == 2
    assert reports[0]["zero_variance/share"] == 0.5


def test_nft_publishes_the_old_policy_and_keeps_it_in_its_checkpoint(model, store, ranks):
    t, _, _, reports = make_trainer(NFT, model, store, ranks)
    before = {name: parameter.detach().clone() for name, parameter in t.policy.trainable().items()}
    published = []
    t.hooks.publish = lambda step: published.append(t.policy.changed_weights())
    assert train(t)
    after = {name: parameter.detach() for name, parameter in t.policy.trainable().items()}
    expected = {name: torch.lerp(before[name], after[name], 0.999) for name in after}  # the decay after one update
    assert all(torch.equal(published[0][name], value) for name, value in expected.items())
    assert any(not torch.equal(value, after[name]) for name, value in expected.items())
    assert all(torch.equal(t.policy.tensors()[f"old.{name}"], value) for name, value in expected.items())
    assert reports[0]["old_distance"] < 1e-10
    assert reports[0]["kl_to_reference"] < 1e-10


@pytest.mark.parametrize("updates_per_batch", [1, 2])
def test_an_old_policy_that_equals_the_trained_one_costs_no_pass(updates_per_batch, model, store, ranks):
    """Two steps with old_decay zero, with and without the saved passes: the weights agree bit for bit."""

    def run(always_differs):
        sizes = {"steps": 2, "updates_per_batch": updates_per_batch}
        t, _, _, reports = make_trainer(NFT + 'old_decay = "zero"\n', model, store, ranks, **sizes)
        swaps = 0
        applied = t.policy.old.applied

        def counted():
            nonlocal swaps
            swaps += 1
            return applied()

        t.policy.old.applied = counted
        if always_differs:
            update = t.policy.old.update
            t.policy.old.update = lambda updates: update(updates) + 1e-9
        assert train(t)
        return swaps, t.policy.all_weights(), reports

    (swaps, weights, reports), (all_swaps, expected, slow_reports) = run(False), run(True)
    assert swaps < all_swaps
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert [one["old_distance"] for one in reports] == [one["old_distance"] for one in slow_reports]
    assert (reports[1]["old_distance"] == 0) == (updates_per_batch == 1)


def test_nft_groups_hold_final_latents_only_and_old_ones_are_welcome(model, store, ranks):
    def age(groups):
        for group in groups:
            for sample in group.samples:
                assert list(sample.trajectory.latent_positions) == [5]
                assert sample.trajectory.latents.spec.shape[0] == 1
                sample.first_step_version.step = 0

    t, _, notices, reports = make_trainer(NFT, model, store, ranks, age)
    t.state.step, t.recipe = 3, t.recipe.model_copy(update={"train": t.recipe.train.model_copy(update={"steps": 4})})
    assert train(t)
    assert notices == []
    assert reports[0]["staleness/max"] == 3
    assert reports[0]["staleness/share_0"] == 0


def test_old_means_are_those_before_the_first_update(model, store, ranks):
    text = "[objective]\nguard = true\ndppo_threshold = 1e-3\nrecompute_old_log_prob = true\n"
    t, _, notices, _ = make_trainer(text, model, store, ranks, updates_per_batch=2)
    seen = []
    terms = t.objective.terms
    t.objective.terms = lambda policy, batch: seen.append(terms(policy, batch)) or seen[-1]
    assert train(t)
    assert notices == []
    assert bool((seen[0].means["divergence/mean"] == 0).all())
    assert bool((seen[0].means["ratio/mean"] == 1).all())
    assert bool((seen[-1].means["divergence/mean"] > 0).all())


def test_the_ratio_of_awm_is_to_the_policy_before_the_step(model, store, ranks):
    t, _, notices, reports = make_trainer(AWM, model, store, ranks, updates_per_batch=2)
    seen = []
    terms = t.objective.terms
    t.objective.terms = lambda policy, batch: seen.append(terms(policy, batch)) or seen[-1]
    assert train(t)
    assert notices == []
    first, second = seen[0].means["ratio/mean"], seen[-1].means["ratio/mean"]
    assert bool((first == 1).all())
    assert bool((second != 1).any())
    assert 0 < reports[0]["effective_sample_size"] <= 1
    assert "ratio/mean_square" not in reports[0]


def test_dpo_prefers_the_best_of_each_group_to_the_worst_and_each_rank_takes_its_own(model, store, ranks):
    t, *_ = make_trainer(DPO, model, store, ranks)
    group = t.source._inner.groups[0]
    rewards = train_rewards(group)["first"]
    best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
    found = t.objective.pairs(group, range(3), store.get, 0)
    assert [(pair.sample_index, pair.rejected_index) for pair in found] == [(best, worst)] * 2
    assert t.objective.pairs(group, [worst], store.get, 0) == []
    latents = torch_codec.decode(group.samples[worst].trajectory.latents, store.get)
    assert torch.equal(found[0].rejected, latents[-1])
    batch = t.objective.stack(found, 1.0, torch.device("cpu"))
    assert (len(batch.latent), len(batch.weight)) == (4, 2)
    noise = batch.target + torch.stack([*(pair.x0 for pair in found), *(pair.rejected for pair in found)])
    torch.testing.assert_close(noise[:2], noise[2:])  # the same for both sides
    assert torch.equal(batch.sigma[:2], batch.sigma[2:])
    for sample in group.samples:
        sample.rewards[0].value = 0.5
    with pytest.raises(DataLoss, match="none is preferred"):
        t.objective.pairs(group, range(3), store.get, 0)


def test_dpo_moves_its_margin(model, store, ranks):
    t, _, notices, reports = make_trainer(
        DPO.replace("sigmas", "dpo_beta = 10.0\nsigmas"), model, store, ranks, steps=3
    )
    assert train(t)
    assert notices == []
    assert reports[0]["preference/margin"] == 0
    assert reports[2]["loss"] < reports[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_a_kl_to_a_moving_average_starts_at_zero_and_the_average_is_in_the_checkpoint(model, store, ranks):
    text = AWM + 'kl_coef = 0.1\nkl_reference = "ema"\n[ema]\nmax_decay = 0.5\n'
    t, _, notices, _ = make_trainer(text, model, store, ranks, updates_per_batch=2)
    before = {name: parameter.detach().clone() for name, parameter in t.policy.trainable().items()}
    seen = []
    terms = t.objective.terms
    t.objective.terms = lambda policy, batch: seen.append(terms(policy, batch)) or seen[-1]
    assert train(t)
    assert notices == []
    assert t.policy.reference_copy is None
    assert bool((seen[0].means["kl_to_reference"] == 0).all())
    assert bool((seen[-1].means["kl_to_reference"] > 0).all())
    held = t.policy.tensors()
    moved = [name for name, value in before.items() if not torch.equal(held[f"ema.{name}"], value)]
    assert moved
    assert any(not torch.equal(held[f"ema.{name}"], held[name].detach()) for name in moved)


def test_lora_is_published_merged(model, store, ranks):
    t, *_ = make_trainer(LORA, model, store, ranks)
    train(t)
    name = "transformer_blocks.0.attn.to_q"
    layer = t.policy.module.get_submodule(name)
    x = torch.randn(3, 64)
    full = {part: t.policy.module.get_parameter(f"{name}.{part}").detach() for part in
            ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")}  # fmt: skip
    adapted = (
        x @ full["base_layer.weight"].T + 2.0 * (x @ full["lora_A.default.weight"].T) @ full["lora_B.default.weight"].T
    )
    merged = x @ t.policy.changed_weights()[f"{name}.weight"].T
    assert layer.scaling["default"] == 2.0
    torch.testing.assert_close(merged, adapted)
    assert not torch.allclose(merged, x @ full["base_layer.weight"].T)


def test_a_group_with_a_missing_blob_is_left_out_and_reported(model, store, ranks):
    t, source, notices, reports = make_trainer("", model, store, ranks)
    store.delete("run/groups/g00000000.bin")
    assert train(t)
    assert list(source.failed) == ["g00000000"]
    assert notices[0][0] == "GROUP_UNUSABLE"
    assert "no blob 'run/groups/g00000000.bin'" in notices[0][1]
    assert (reports[0]["groups"], reports[0]["groups/unusable"], reports[0]["pairs"]) == (1, 1, 6)


def test_a_reward_that_is_not_finite_is_never_trained_on(model, store, ranks):
    def poison(groups):
        for group in groups:
            group.samples[1].rewards[0].value = float("nan")

    t, source, notices, reports = make_trainer("", model, store, ranks, poison)
    before = t.policy.changed_weights()
    assert train(t)
    assert set(source.failed) == {"g00000000", "g00000001"}
    assert [reason for reason, _ in notices] == ["GROUP_UNUSABLE", "GROUP_UNUSABLE", "STEP_SKIPPED"]
    assert all(torch.equal(value, before[name]) for name, value in t.policy.changed_weights().items())
    assert reports[0]["steps/skipped"] == 1


def test_a_loss_that_is_not_finite_skips_the_update(model, store, ranks, tmp_path):
    def poison(groups):
        log_probs = groups[0].samples[0].trajectory.log_probs
        log_probs.CopyFrom(torch_codec.encode(torch.tensor([-1e6, -1e6])))  # a ratio of infinity
        groups[0].samples[0].rewards[0].value = -10.0

    # The engine's log-probs are far off on purpose: let the run go on all the same.
    t, _, notices, reports = make_trainer("[objective]\nmax_log_prob_drift = 1e9\n", model, store, ranks, poison)
    before, t.dump_folder = t.policy.changed_weights(), tmp_path / "skipped"
    assert train(t)
    written = json.loads((t.dump_folder / "step_00000001_rank_0.json").read_text())
    assert (written["pair"]["group_id"], written["pair"]["sample_index"]) == ("g00000000", 0)
    assert math.isinf(written["pair_loss"])
    tensors = load_file(t.dump_folder / "step_00000001_rank_0.safetensors")
    assert tensors.keys() >= {"latent", "next_latent", "positive.encoder_hidden_states"}
    assert [reason for reason, _ in notices] == ["STEP_SKIPPED"]
    assert (t.state.updates, t.state.skipped, reports[0]["steps/skipped"]) == (0, 1, 1)
    assert all(torch.equal(value, before[name]) for name, value in t.policy.changed_weights().items())


@pytest.mark.parametrize(("factor", "norm", "skipped"), [("3.0", 0.2, True), ("1e6", 0.2, False), ("", 1e-6, False)])
def test_a_gradient_spike_skips_the_update(factor, norm, skipped, model, store, ranks):
    t, _, notices, reports = make_trainer(LORA, model, store, ranks)
    if factor:
        section = t.recipe.train.model_copy(update={"grad_spike_factor": float(factor)})
        t.recipe = t.recipe.model_copy(update={"train": section})
    assert train(t)
    usual = reports[0]["grad_norm"]
    t, _, notices, reports = make_trainer(LORA, model, store, ranks)
    if factor:
        t.recipe = t.recipe.model_copy(update={"train": section})
    t.state.grad_norms = [usual * norm] * 16
    assert train(t)
    assert (t.state.updates == 0, [reason for reason, _ in notices] == ["STEP_SKIPPED"]) == (skipped, skipped)
    assert t.state.grad_norms == [*[usual * norm] * 16, usual]


def test_a_roll_back_gives_the_weights_of_the_good_step_and_removes_what_came_after(model, store, ranks, tmp_path):
    t, *_ = make_trainer(LORA, model, store, ranks, steps=4)
    checkpoints, weights = Checkpoints(tmp_path / "kept", ranks, keep=9), {}

    def save(step):
        weights[step] = {name: value.detach().clone() for name, value in t.policy.trainable().items()}
        checkpoints.save(t.state, t.policy.tensors(), t.optimizer, "")

    t.hooks.publish = save
    assert train(t)
    good = checkpoints.roll_back(2)
    assert [path.name for path in list_checkpoints(tmp_path / "kept")] == ["step_00000001", "step_00000002"]
    t.state = checkpoints.load(good, t.policy.tensors(), t.optimizer)
    assert (t.state.step, len(t.state.grad_norms)) == (2, 2)
    assert all(torch.equal(value, weights[2][name]) for name, value in t.policy.trainable().items())
    assert checkpoints.roll_back(0).name == "step_00000001"  # the best there is


def test_a_run_that_is_told_to_ends(model, store, ranks):
    t, *_ = make_trainer(LORA, model, store, ranks, steps=4)
    t.hooks.watch = lambda step, values: step == 2
    assert train(t) is False
    assert t.state.step == 2


def test_a_run_that_begins_apart_from_its_engine_ends_before_it_publishes(model, store, ranks):
    def shift(groups):
        log_probs = groups[0].samples[0].trajectory.log_probs
        log_probs.CopyFrom(torch_codec.encode(torch_codec.decode(log_probs, store.get) + 0.01))

    t, *_ = make_trainer("", model, store, ranks, shift)
    t.hooks.publish = lambda step: pytest.fail("published")
    with pytest.raises(RunFailed, match="disagree by"):
        train(t)


def test_a_failing_source_ends_the_run_with_its_message(model, store, ranks):
    t, source, *_ = make_trainer(LORA, model, store, ranks)
    source.groups = ValueError("the stream is gone")
    with pytest.raises(RunFailed, match="the stream is gone"):
        train(t)


def test_stop_ends_and_save_saves(model, store, ranks):
    t, source, *_ = make_trainer(LORA, model, store, ranks)
    answers, saved = [Signal.SAVE, Signal.WAIT, Signal.STOP], []
    source.take = lambda step: answers.pop(0)
    t.hooks.save = lambda: saved.append(t.state.step)
    assert train(t) is False
    assert saved == [0]


def test_guidance_enters_the_velocity(model, store, ranks):
    guided, guided_source, _, reports = make_trainer(LORA, model, store, ranks)
    recipe = parse_recipe(recipe_text(model).replace("window_size = 2", "window_size = 2\nguidance_scale = 4.0"))
    guided.recipe, guided_source.groups = recipe, make_groups(recipe, store, "guided", 2)
    guided.policy.guidance_scale = 4.0
    assert train(guided)
    assert reports[0]["log_prob_drift/max"] == 0.0  # only the guided velocity gives the recorded log-probs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.latent_positions.pop(), "rows"),
        (lambda t: t.log_probs.CopyFrom(torch_codec.encode(torch.tensor([0.0, float("nan")]))), "not finite"),
        (lambda t: t.trained_steps.__setitem__(0, 4), "around step 4"),
        (lambda t: setattr(t, "conditioning_id", "x"), "conditioning 'x'"),
    ],
)
def test_a_damaged_trajectory_is_refused_with_the_reason(change, message, model, store):
    group = make_groups(parse_recipe(recipe_text(model)), store, "run", 1)[0]
    trajectory = group.samples[0].trajectory
    if trajectory.trained_steps[0] + 1 == 4:
        trajectory.trained_steps[:] = [2, 3]
    change(trajectory)
    with pytest.raises(DataLoss, match=message):
        pairs_of(group, [0], store.get, transitions)


def test_pairs_are_ordered_by_step_and_sample_as_the_engine_ran_them(model, store):
    group = make_groups(parse_recipe(recipe_text(model)), store, "run", 1)[0]
    first = group.samples[0].trajectory.trained_steps[0]
    found = [(pair.step, pair.sample_index) for pair in pairs_of(group, [0, 1, 2], store.get, transitions)]
    assert found == [(step, sample) for step in (first, first + 1) for sample in (0, 1, 2)]


def test_advantages_belong_to_their_samples(model, store, ranks):
    recipe = parse_recipe(recipe_text(model))
    groups = make_groups(recipe, store, "run", 2)
    batch = load_batch(
        groups, 1, lambda g, i: pairs_of(g, i, store.get, transitions), ranks, lambda group_id, reason: None
    )
    assign_advantages(batch, recipe)
    for group in groups:
        rewards = train_rewards(group)["first"]
        best = max(range(3), key=rewards.__getitem__)
        own = [pair for pair in batch.shares[0] if pair.group_id == group.group_id]
        assert max(own, key=lambda pair: pair.advantage).sample_index == best
        assert sum(pair.advantage for pair in own) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("count", "updates", "sizes"), [(6, 3, [2, 2, 2]), (5, 2, [2, 3]), (1, 3, [1])])
def test_groups_are_split_evenly_over_updates(count, updates, sizes):
    assert [len(part) for part in split_groups(list(range(count)), updates)] == sizes
