"""Rewards on CLIP features, on small CLIP models with random weights, against transformers' own forward pass."""

import json

import numpy as np
import pytest
from headwater_reward import checks, registry
from headwater_reward.batching import PendingItem, score_items
from headwater_reward.config import parse_args
from headwater_reward.registry import ScoreItem
from PIL import Image

from headwater.errors import FailedPrecondition, InvalidArgument

pytest.importorskip("torch")
import itertools

import headwater.diffusion  # noqa: F401  before transformers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

PROMPTS = ["a red circle", "a blue square and a dog"]


def save_clip(folder, seed=0, width=32):
    """A CLIP model of a few thousand weights, in the layout that the rewards load."""
    torch.manual_seed(seed)
    words = [chr(c) for c in range(97, 123)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *words, *(word + "</w>" for word in words)]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    layers = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**layers, "vocab_size": len(tokens), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=width,
        logit_scale_init_value=3.0,
    )
    model = transformers.CLIPModel(config)
    with torch.no_grad():  # far from the initial near-zero weights, so that images and prompts differ visibly
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder, safe_serialization=True)
    size = {"height": 32, "width": 32}
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("models") / "clip")


def loaded(name, folder, **settings):
    (reward,) = registry.create([name], {name: {"model": str(folder), **settings}})
    reward.load(1)
    return reward


def images(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (40 + 8 * i, 48, 3), np.uint8) for i in range(count)]


def values(reward, pictures, prompts, **params):
    params = reward.params_model(**params)
    items = [ScoreItem(p if p.ndim == 4 else p[None], t, {}, params) for p, t in zip(pictures, prompts, strict=True)]
    return [score.value for score in reward.score(items)]


def reference(folder, picture, prompt):
    """(cosine, logit) of one pair by transformers' forward pass, without our code."""
    model = transformers.CLIPModel.from_pretrained(folder)
    processor = transformers.CLIPImageProcessor.from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)([prompt], truncation=True, return_tensors="pt")
    with torch.no_grad():
        output = model(**tokens, **processor(images=[Image.fromarray(picture)], return_tensors="pt"))
    cosine = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds).item()
    return cosine, output.logits_per_image.item()


@pytest.mark.parametrize("name", ["pickscore", "clipscore", "hpsv2"])
def test_scores_are_those_of_transformers(clip_folder, name):
    reward, pictures = loaded(name, clip_folder), images(4)
    prompts = [PROMPTS[i % 2] for i in range(4)]
    expected = []
    for picture, prompt in zip(pictures, prompts, strict=True):
        cosine, logit = reference(clip_folder, picture, "A photo depicts " * (name == "clipscore") + prompt)
        expected.append({"pickscore": logit / 26, "clipscore": 2.5 * max(cosine, 0), "hpsv2": cosine}[name])
    assert values(reward, pictures, prompts) == pytest.approx(expected, abs=1e-5)
    assert np.ptp(expected) > 0.01  # the model tells them apart


def test_the_logit_scale_is_the_one_of_the_checkpoint(clip_folder):
    (picture,) = images(1)
    (score,) = loaded("pickscore", clip_folder).score(
        [ScoreItem(picture[None], PROMPTS[0], {}, registry.parse_params(loaded_params("pickscore"), {}, field="p"))]
    )
    cosine, _ = reference(clip_folder, picture, PROMPTS[0])
    assert score.details["raw"] == pytest.approx(np.exp(3.0) * cosine, rel=1e-4)
    assert score.value == pytest.approx(np.exp(3.0) * cosine / 26, rel=1e-4)


def loaded_params(name):
    return registry.known()[name].load().params_model


def test_clipscore_is_never_below_zero(clip_folder):
    reward, pictures = loaded("clipscore", clip_folder), images(12)
    cosines = [reference(clip_folder, picture, PROMPTS[0])[0] for picture in pictures]
    assert min(cosines) < 0
    assert values(reward, pictures, [PROMPTS[0]] * 12, prefix="") == pytest.approx(
        [2.5 * max(cosine, 0) for cosine in cosines], abs=1e-5
    )


@pytest.mark.parametrize("names", [("layers.0", "layers.2", "layers.10"), ("",)])
def test_aesthetic_is_the_head_on_the_unit_image_features(clip_folder, tmp_path, names):
    torch.manual_seed(1)
    widths = [32, 16, 8, 1] if len(names) == 3 else [32, 1]
    head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    tensors = {}
    for name, layer in zip(names, head, strict=True):
        dot = name + "." if name else ""
        tensors |= {f"{dot}weight": layer.weight.detach(), f"{dot}bias": layer.bias.detach()}
    safetensors.save_file(tensors, tmp_path / "head.safetensors")
    reward, pictures = loaded("aesthetic", clip_folder, head=str(tmp_path / "head.safetensors")), images(3)
    model = transformers.CLIPModel.from_pretrained(clip_folder)
    processor = transformers.CLIPImageProcessor.from_pretrained(clip_folder)
    for picture, value in zip(pictures, values(reward, pictures, [""] * 3), strict=True):
        with torch.no_grad():
            pixels = processor(images=[Image.fromarray(picture)], return_tensors="pt")["pixel_values"]
            features = model.visual_projection(model.vision_model(pixels).pooler_output)
            assert value == pytest.approx(head(features / features.norm()).item(), abs=1e-5)


@pytest.mark.parametrize("shapes", [{"weight": (1, 9), "bias": (1,)}, {"weight": (2, 32), "bias": (2,)}, {"x": (1,)}])
def test_a_head_that_does_not_fit_stops_the_start(clip_folder, tmp_path, shapes):
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    safetensors.save_file(tensors, tmp_path / "head.safetensors")
    with pytest.raises(FailedPrecondition, match=r"head"):
        loaded("aesthetic", clip_folder, head=str(tmp_path / "head.safetensors"))


def test_a_video_scores_the_mean_of_evenly_spaced_frames(clip_folder):
    reward = loaded("hpsv2", clip_folder)
    video = np.stack([np.full((32, 32, 3), 20 * f, np.uint8) for f in range(9)])
    single = values(reward, list(video), [PROMPTS[0]] * 9)
    assert values(reward, [video], PROMPTS[:1], frames=3) == pytest.approx([np.mean([single[i] for i in (0, 4, 8)])])
    assert values(reward, [video], PROMPTS[:1], frames=99) == pytest.approx([np.mean(single)])


def test_a_long_prompt_is_cut_off(clip_folder):
    assert np.isfinite(values(loaded("hpsv2", clip_folder), images(1), ["dog " * 500])).all()


def check(reward):
    golden = reward.golden_images()
    params = reward.params_model()
    items = [PendingItem(lambda g=g: g.image_HWC[None], g.prompt, {}, params) for g in golden]
    return checks.compare(reward.name, golden, score_items(reward, items))


def test_golden_images_of_the_operator_tell_one_checkpoint_from_another(clip_folder, tmp_path):
    Image.fromarray(images(1)[0]).save(tmp_path / "a.png")
    cosine, _ = reference(clip_folder, images(1)[0], PROMPTS[0])
    (tmp_path / "golden.json").write_text(json.dumps([{"image": "a.png", "prompt": PROMPTS[0], "score": cosine}]))
    golden = {"golden": str(tmp_path / "golden.json")}
    assert check(loaded("hpsv2", clip_folder)).passed
    assert check(loaded("hpsv2", clip_folder, **golden)).passed
    assert not check(loaded("hpsv2", save_clip(tmp_path / "other", seed=5), **golden)).passed


def break_config(folder):
    (folder / "config.json").unlink()


def pickle_only(folder):
    torch.save(transformers.CLIPModel.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def lose_a_tensor(folder):
    tensors = safetensors.load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize("damage", [break_config, pickle_only, lose_a_tensor, truncate])
def test_a_model_that_is_not_whole_or_not_safetensors_is_refused(tmp_path, damage):
    folder = save_clip(tmp_path / "clip")
    damage(folder)
    with pytest.raises(FailedPrecondition, match=r"cannot load a CLIP model.*safetensors"):
        loaded("pickscore", folder)


def test_a_learned_reward_without_a_model_says_which_setting_is_missing():
    with pytest.raises(InvalidArgument, match=r"--set pickscore\.model is missing; it is a folder or hub id"):
        registry.create(["pickscore"])
    with pytest.raises(InvalidArgument, match=r"modl is unknown; did you mean 'model'"):
        registry.create(["pickscore"], {"pickscore": {"modl": "x", "model": "y"}})
    with pytest.raises(InvalidArgument, match=r"reward 'ocr' has no settings"):
        registry.create(["ocr"], {"ocr": {"model": "x"}})


def test_a_server_without_the_extra_starts_and_says_what_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(registry.known()["hpsv2"].load(), "requires", ("torch", "no_such_module"))
    names = [reward.name for reward in registry.create([], {"hpsv2": {"model": "x"}})]
    assert "color_shape" in names
    assert "hpsv2" not in names
    monkeypatch.setattr(registry, "LEARNED_MODULES", frozenset({"no_such_module"}))
    with pytest.raises(FailedPrecondition, match=r"needs no_such_module.*headwater\[reward-models\]"):
        registry.create(["hpsv2"])
    assert "'hpsv2' needs no_such_module" in caplog.text


def test_settings_come_from_the_command_line(capsys):
    config = parse_args(["--rewards", "hpsv2", "--set", "hpsv2.model=/m=1", "--set", "hpsv2.device=cuda:1"])
    assert config.settings == {"hpsv2": {"model": "/m=1", "device": "cuda:1"}}
    for wrong in (["hpsv2=x"], ["hpsv2.model"], ["a.b=1", "a.b=2"]):
        with pytest.raises(SystemExit):
            parse_args([word for value in wrong for word in ("--set", value)])
        assert "--set" in capsys.readouterr().err
