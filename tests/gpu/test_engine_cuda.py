"""The SGLang engine on one GPU: generation, memory release, and parity with the trainer's code."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import GroupRequest

from headwater.common.v1.sampling_pb2 import SamplingParams, TransitionParams
from headwater.sampling import resolve


@pytest.fixture(scope="module")
def engine(model):
    loaded = load_engine("sglang", model, "bf16", "cuda:0")
    yield loaded
    loaded.close()


def request(seeds=(1, 2, 3, 4)):
    params = SamplingParams(steps=10, height_px=64, width_px=64, transition=TransitionParams(noise_level=0.7))
    return GroupRequest("a red circle", seeds, resolve(params, group_seed=1))


def test_a_group_repeats_bit_by_bit(engine):
    first, second = engine.generate(request()), engine.generate(request())
    assert torch.equal(first.latents, second.latents)
    assert torch.isfinite(first.log_probs).all()
    assert first.media.shape == (4, 1, 64, 64, 3)


def test_writing_to_the_views_changes_the_pictures(engine):
    before = engine.generate(request()).media
    view = engine.weight_views("transformer")["proj_out.weight"][0]
    kept = view.clone()
    with torch.inference_mode():
        view.mul_(1.5)
        engine.weights_changed()
        changed = engine.generate(request()).media
        view.copy_(kept)
        engine.weights_changed()
    assert not np.array_equal(before, changed)
    assert np.array_equal(before, engine.generate(request()).media)


def test_released_memory_comes_back_with_the_same_weights(engine):
    before = engine.generate(request()).media
    freed = engine.release_memory()
    taken = engine.resume_memory()
    print(f"\nreleased {freed} bytes, took {taken} bytes")
    assert freed > 0
    assert np.array_equal(before, engine.generate(request()).media)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parity_with_the_trainer(model, precision):
    command = [
        sys.executable, "-m", "headwater_rollout.parity", str(model), "--precision", precision, "--device", "cuda:0",
        "--n", "8", "--steps", "10", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    json.loads(done.stdout.splitlines()[-1])
