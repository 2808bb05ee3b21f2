"""jpeg_compressibility and jpeg_incompressibility: bytes on disk, their sign, and frames of a video."""

import numpy as np
import pytest
from headwater_reward import checks, registry
from headwater_reward.batching import PendingItem, score_items
from headwater_reward.registry import ScoreItem
from PIL import Image

NAMES = ["jpeg_compressibility", "jpeg_incompressibility"]


def scored(name, frames_FHWC, **params):
    (reward,) = registry.create([name])
    (score,) = reward.score(
        [ScoreItem(frames_FHWC, "", {}, registry.parse_params(reward.params_model, params, field=""))]
    )
    return score.value


def test_the_score_is_the_size_of_the_file_in_thousands_of_bytes(tmp_path):
    frames = np.random.default_rng(1).integers(0, 256, (2, 40, 56, 3), np.uint8)
    sizes = []
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"{i}.jpg", quality=95)
        sizes.append((tmp_path / f"{i}.jpg").stat().st_size / 1000)
    assert scored("jpeg_incompressibility", frames[:1]) == sizes[0]
    assert scored("jpeg_compressibility", frames[:1]) == -sizes[0]
    assert scored("jpeg_incompressibility", frames) == pytest.approx(sum(sizes) / 2)
    assert scored("jpeg_compressibility", frames, aggregate="min") == -max(sizes)


@pytest.mark.parametrize("name", NAMES)
def test_golden_images_pass_and_the_wrong_sign_does_not(name):
    (reward,) = registry.create([name])
    golden = reward.golden_images()
    params = registry.parse_params(reward.params_model, {}, field="")
    results = score_items(reward, [PendingItem(lambda g=g: g.image_HWC[None], g.prompt, {}, params) for g in golden])
    assert checks.compare(name, golden, results).passed
    assert not checks.compare(name, golden, [registry.Score(-result.value) for result in results]).passed
