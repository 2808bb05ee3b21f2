"""The parts of supervised training that need no run."""

from functools import partial
from pathlib import Path

import pytest
import torch
from headwater_trainer.ema import Ema
from headwater_trainer.export import export_pipeline
from headwater_trainer.objectives.sft import GRID, Sft, bucket_of, noisy
from headwater_trainer.optimizer import schedule_factor
from safetensors.torch import load_file

from headwater.config.load import parse_recipe
from headwater.config.recipe import OptimizerSection
from headwater.diffusion.decay import ema_decay
from headwater.errors import InvalidArgument

RECIPE = """
[model]
path = "m"
[objective]
name = "sft"
sigma_distribution = "{distribution}"
[data]
generator = "synthetic"
[prompts]
texts = ["a red circle"]
[train]
steps = 2
"""


def test_ema_lags_is_applied_for_a_while_and_keeps_the_weights():
    weight = torch.nn.Parameter(torch.zeros(3))
    ema = Ema({"w": weight}, partial(ema_decay, max_decay=0.9))
    with torch.no_grad():
        weight.fill_(1.0)
    ema.update(1)  # decay 2 / 11
    assert torch.allclose(ema.tensors()["ema.w"], torch.full((3,), 9 / 11))
    with ema.applied():
        assert torch.allclose(weight, torch.full((3,), 9 / 11))
    assert torch.equal(weight.detach(), torch.ones(3))


def test_uniform_sigmas_cover_the_shifted_grid():
    sigma = Sft(parse_recipe(RECIPE.format(distribution="uniform")), 3.0).draw_sigmas(200_000, torch.Generator())
    unshifted = sigma / (3 - 2 * sigma)
    assert len(sigma.unique()) == GRID
    assert sigma.max() == 1
    assert abs(float(unshifted.mean()) - 0.5005) < 0.002


def test_logit_normal_sigmas_prefer_the_middle_and_the_recipe_shift_comes_first():
    text = RECIPE.format(distribution="logit_normal") + "[sampling]\nflow_shift = 1.0\n"
    sigma = Sft(parse_recipe(text), 3.0).draw_sigmas(200_000, torch.Generator())
    share = torch.logit(sigma.clamp(1e-3, 1 - 1e-3))
    assert abs(float(share.mean())) < 0.02
    assert abs(float(share.std()) - 1) < 0.02


def test_a_noisy_batch_is_on_the_line_and_its_target_is_the_way_along_it():
    latents, noise = torch.randn(2, 4, 3, 2, 2)
    sigma = torch.tensor([0.0, 0.25, 0.5, 1.0])
    batch = noisy(latents, noise, sigma, {})
    assert torch.equal(batch.latent[0], latents[0])
    assert torch.equal(batch.latent[3], noise[3])
    assert torch.allclose(batch.latent - sigma.view(-1, 1, 1, 1) * batch.target, latents, atol=1e-6)
    assert batch.timestep.tolist() == [0.0, 250.0, 500.0, 1000.0]
    assert bucket_of(sigma).tolist() == [0, 1, 2, 3]


def test_learning_rate_schedules():
    def at(step, **options):
        return schedule_factor(OptimizerSection(**options), step, 100)

    assert at(99) == 1.0
    assert at(0, warmup_steps=4) == 0.25
    assert at(4, schedule="cosine", warmup_steps=4) == 1.0
    assert at(52, schedule="cosine", warmup_steps=4) == pytest.approx(0.5)
    assert at(0, schedule="one_cycle") == pytest.approx(0.04)
    assert at(30, schedule="one_cycle") == 1.0
    assert at(99, schedule="one_cycle") < 0.001


def test_export_replaces_weights_keeps_buffers_and_refuses_strange_names(tiny_sd3_dir: Path, tmp_path: Path):
    before = load_file(tiny_sd3_dir / "transformer" / "diffusion_pytorch_model.safetensors")
    name = "transformer_blocks.0.attn.to_q.weight"
    out = export_pipeline(tiny_sd3_dir, tmp_path / "out", "transformer", {name: before[name] + 1}, "fp16")
    after = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    assert after.keys() == before.keys()
    assert torch.equal(after[name], (before[name] + 1).half())
    assert torch.equal(after["pos_embed.pos_embed"], before["pos_embed.pos_embed"].half())
    assert {path.relative_to(out) for path in out.rglob("*")} == {
        path.relative_to(tiny_sd3_dir) for path in tiny_sd3_dir.rglob("*")
    }
    with pytest.raises(ValueError, match="has no tensor nothing"):
        export_pipeline(tiny_sd3_dir, tmp_path / "out", "transformer", {"nothing": before[name]})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("[data]\n", "[[rewards]]\nname = 'ocr'\n[data]\n"), "rewards"),
        (("[data]\ngenerator = \"synthetic\"\n", ""), "data"),
        (("generator = \"synthetic\"\n", ""), "data.path"),
        (("generator = \"synthetic\"\n", 'path = "none.jsonl"\n'), "data.path"),
        (('name = "sft"\n', ""), "data"),
    ],
)  # fmt: skip
def test_recipes_that_do_not_fit_together_name_the_key(change, field):
    with pytest.raises(InvalidArgument) as raised:
        parse_recipe(RECIPE.format(distribution="uniform").replace(*change))
    assert raised.value.field == field
