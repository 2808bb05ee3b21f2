"""pickscore, clipscore, hpsv2 and aesthetic on a small CLIP model with random weights, against transformers' logits."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from headwater_reward import registry, settings
from headwater_reward.batching import PendingItem, score_items
from headwater_reward.registry import ScoreItem
from headwater_reward.settings import RewardSettings
from safetensors.torch import load_file, save_file

from headwater.diffusion import tiny_sd3
from headwater.errors import FailedPrecondition, InvalidArgument

PROMPTS = ["a red circle", "two blue squares left of a star", "x"]


@pytest.fixture(scope="module")
def clip_dir(tmp_path_factory):
    """A whole CLIP model of a few thousand weights, as save_pretrained writes it."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    vocabulary = tiny_sd3._save_clip_tokenizer(folder)
    text = {
        "vocab_size": len(vocabulary), "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 77,
        "bos_token_id": vocabulary["<|startoftext|>"], "eos_token_id": vocabulary["<|endoftext|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, logit_scale_init_value=3.0)
    CLIPModel(config).save_pretrained(folder)
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessorPil(**size).save_pretrained(folder)
    return folder


def image(seed, height=48, width=40):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def expected_logits(folder, images, prompts):
    """[images, prompts] of transformers' own forward pass, padded to the full context; and the embeddings of images."""
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(folder)
    tokens = CLIPTokenizer.from_pretrained(folder)(
        prompts, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    )
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images=images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        out = model(pixel_values=pixels, **tokens)
    return out.logits_per_image, out.image_embeds, float(model.logit_scale.detach().exp())


def made(kind, folder, name=None, **options):
    (reward,) = registry.create([], {name or kind: RewardSettings(kind, options={"model": str(folder), **options})})
    reward.load(1)
    return reward


def scores(reward, media, prompts, **params):
    checked = registry.parse_params(reward.params_model, params, field="params")
    batch = [
        ScoreItem(f if f.ndim == 4 else f[None], prompt, {}, checked) for f, prompt in zip(media, prompts, strict=True)
    ]
    return reward.score(batch)


FORMULAS = {
    "pickscore": lambda logit, scale: logit / 26,
    "clipscore": lambda logit, scale: 2.5 * max(logit / scale, 0.0),
    "hpsv2": lambda logit, scale: logit / scale,
}


@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_scores_are_those_of_transformers_and_the_papers_formula(clip_dir, kind):
    images = [image(0), image(1, 64, 64), image(2, 33, 70)]
    options = {"processor": str(clip_dir)} if kind == "pickscore" else {}
    got = scores(made(kind, clip_dir, **options), images, PROMPTS)
    logits, _, scale = expected_logits(clip_dir, images, PROMPTS)
    wanted = [FORMULAS[kind](float(logits[i, i]), scale) for i in range(3)]
    assert [score.value for score in got] == pytest.approx(wanted, abs=1e-5)
    assert [score.details["cosine"] for score in got] == pytest.approx((logits.diag() / scale).tolist(), abs=1e-5)
    assert len(set(wanted)) > 1


def test_the_prefix_of_clipscore_is_part_of_the_text(clip_dir):
    reward = made("clipscore", clip_dir)
    (with_prefix,) = scores(reward, [image(0)], ["a cat"], prefix="A photo depicts ")
    (written_out,) = scores(reward, [image(0)], ["A photo depicts a cat"])
    (without,) = scores(reward, [image(0)], ["a cat"])
    assert with_prefix.details == written_out.details != without.details


def test_a_prompt_longer_than_the_context_is_cut_off(clip_dir):
    (score,) = scores(made("hpsv2", clip_dir), [image(0)], ["word " * 500])
    assert np.isfinite(score.value)


@pytest.mark.parametrize("layers", [(16, 1), (16, 8, 4, 1)])
def test_aesthetic_is_the_head_on_the_embedding_of_length_one(clip_dir, tmp_path, layers):
    torch.manual_seed(1)
    stack = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in itertools.pairwise(layers)])
    save_file({f"layers.{key}": value for key, value in stack.state_dict().items()}, tmp_path / "head.safetensors")
    got = scores(made("aesthetic", clip_dir, head=str(tmp_path / "head.safetensors")), [image(0), image(1)], ["", "x"])
    _, embeds, _ = expected_logits(clip_dir, [image(0), image(1)], ["x"])
    with torch.no_grad():
        assert [score.value for score in got] == pytest.approx(stack(embeds)[:, 0].tolist(), abs=1e-5)


def test_a_video_is_scored_by_its_frames(clip_dir):
    reward = made("hpsv2", clip_dir)
    video = np.stack([image(seed) for seed in range(9)])
    alone = [score.value for score in scores(reward, [video[i] for i in (0, 4, 8)], ["x"] * 3)]
    (mean,) = scores(reward, [video], ["x"], frames=3)
    (worst,) = scores(reward, [video], ["x"], frames=3, aggregate="min")
    assert mean.value == pytest.approx(np.mean(alone), abs=1e-5)
    assert worst.value == pytest.approx(min(alone), abs=1e-5)
    assert mean.details["highest_frame"] == pytest.approx(max(alone), abs=1e-5)


def test_a_strip_that_would_grow_without_bound_fails_alone(clip_dir):
    first, strip, last = scores(made("hpsv2", clip_dir), [image(0), image(1, 1, 8000), image(0)], ["x"] * 3)
    assert isinstance(strip, InvalidArgument)
    assert first.value == pytest.approx(last.value, abs=1e-6)


def test_golden_images_ask_for_the_order_that_a_trained_model_has(clip_dir):
    from headwater_reward import checks

    reward = made("hpsv2", clip_dir)
    golden = reward.golden_images()
    params = registry.parse_params(reward.params_model, {}, field="params")
    items = [PendingItem(lambda g=g: g.image_HWC[None], g.prompt, {}, params) for g in golden]
    assert not checks.compare("hpsv2", golden, score_items(reward, items)).passed  # random weights know no circles
    good = [registry.Score(0.2 if image.above else 0.1) for image in golden]
    assert checks.compare("hpsv2", golden, good).passed


def test_pickled_weights_are_not_read(clip_dir, tmp_path):
    folder = shutil.copytree(clip_dir, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FailedPrecondition, match=r"safetensors"):
        made("hpsv2", folder)


def test_half_a_model_is_refused_instead_of_filled_with_random_weights(clip_dir, tmp_path):
    folder = shutil.copytree(clip_dir, tmp_path / "half")
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if "visual_projection" not in k}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FailedPrecondition, match=r"lacks weights, e\.g\. visual_projection"):
        made("hpsv2", folder)


def test_a_head_of_another_model_is_refused(clip_dir, tmp_path):
    save_file({"weight": torch.zeros(1, 768), "bias": torch.zeros(1)}, tmp_path / "head.safetensors")
    with pytest.raises(FailedPrecondition, match="16 numbers of a CLIP embedding"):
        made("aesthetic", clip_dir, head=str(tmp_path / "head.safetensors"))
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        made("aesthetic", clip_dir, head=str(clip_dir / "config.json"))


def test_without_the_packages_the_extra_is_named(monkeypatch):
    from headwater_reward.rewards.preference import PickScoreReward

    monkeypatch.setattr(PickScoreReward, "requires", ("no_such_module",))
    with pytest.raises(FailedPrecondition, match=r"pip install 'headwater\[reward-clip\]'"):
        registry.create(["pickscore"])


def test_the_file_names_models_devices_and_queues(tmp_path, clip_dir):
    file = tmp_path / "rewards.toml"
    file.write_text(f'[hpsv2]\nmodel = "{clip_dir}"\nmax_batch = 4\n[second]\nkind = "hpsv2"\nmodel = "m"\n')
    tables = settings.read(str(file))
    assert [reward.name for reward in registry.create([], tables)] == ["hpsv2", "second"]
    assert (tables["hpsv2"].queue.max_batch, tables["second"].queue.max_batch) == (4, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[hpsv2]\nmodle = "m"', r"hpsv2.modle is unknown; did you mean 'model'"),
        ("[hpsv2]\ndevice = 'cpu'", r"hpsv2.model is missing; give a folder or a hub id"),
        ("[hpsv2]\nmodel = 'm'\nmax_batch = 0", r"hpsv2.max_batch is 0"),
        ("[hpsv2]\nmodel = 'm'\nprecision = 'int8'", r"hpsv2.precision is 'int8'"),
        ("[ocr]\nmodel = 'm'", r"takes no options"),
        ("hpsv2 = 1", r"is no table"),
        ("[hpsv2", r"is no TOML"),
    ],
)
def test_a_wrong_file_names_the_place(tmp_path, text, words):
    file = tmp_path / "rewards.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        registry.create([], settings.read(str(file)))
