"""models/tiny-sd3: small, loadable everywhere, and it knows what prompts ask for."""

import json
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from headwater_reward.rewards.tiny_geneval import evaluate
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import GroupRequest
from PIL import Image

from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.diffusion import families
from headwater.sampling import resolve
from headwater.synthetic import parse

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-sd3"


def test_it_is_at_most_12_megabytes():
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= 12_000_000


def test_few_text_tokens_and_words_are_spelled():
    assert families.resolve(MODEL).text_tokens(MODEL) == (24, 24, 1)
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(str(MODEL), transformer=None, vae=None)
    assert pipeline.tokenizer.tokenize('the word "HI7" on a navy background') == [
        "the", "word", '"', "H", "I", "7", '"', "on", "a", "navy", "background"
    ]  # fmt: skip


def test_it_draws_what_is_asked_and_diffusers_draws_it_too():
    prompt, seeds = "two red circles on a white background", tuple(range(16))
    engine = load_engine("diffusers", MODEL)
    sampling = resolve(SamplingParams(steps=10, height_px=64, width_px=64, guidance_scale=1.0), group_seed=0)
    media = engine.generate(GroupRequest(prompt, seeds, sampling, record_trajectory=False)).media[:, 0]
    right = [all(part == 1 for part in evaluate(picture, parse(prompt)).values()) for picture in media]
    assert np.mean(right) > 0.6
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(str(MODEL), torch_dtype=torch.float32)
    noise = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))[None]
    made = pipeline(
        prompt, num_inference_steps=10, guidance_scale=1.0, height=64, width=64, latents=noise, max_sequence_length=1
    ).images[0]
    assert isinstance(made, Image.Image)
    assert np.abs(np.asarray(made).astype(int) - media[0].astype(int)).mean() < 1.0  # of 255


@pytest.mark.engine
def test_sglang_is_identical_to_the_trainer_on_it():
    command = [sys.executable, "-m", "headwater_rollout.parity", str(MODEL), "--n", "4", "--steps", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["max_output_difference"] == report["max_log_prob_difference"] == 0


DRAW_WITH_BOTH = """
import sys, torch
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import GroupRequest
from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.sampling import resolve

sampling = resolve(SamplingParams(steps=10, height_px=64, width_px=64, guidance_scale=1.0), group_seed=0)
request = GroupRequest("two red circles on a white background", (1, 2), sampling)
first, second = (load_engine(name, sys.argv[1]).generate(request) for name in ("diffusers", "sglang"))
assert first.positive.keys() == second.positive.keys()
for name, tensor in first.positive.items():
    assert tensor.shape == second.positive[name].shape, (name, tensor.shape, second.positive[name].shape)
    assert torch.equal(tensor, second.positive[name]), name
assert (first.media == second.media).all()
"""


@pytest.mark.engine
def test_sglang_sees_the_same_words_and_draws_the_same_pictures():
    command = [sys.executable, "-c", DRAW_WITH_BOTH, str(MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
