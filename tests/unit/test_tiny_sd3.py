"""The tiny pipeline: reproducible, loadable, and with pictures that a reward can tell apart."""

import hashlib
from pathlib import Path

import pytest
import torch

from headwater.diffusion import families, tiny_sd3


@pytest.fixture
def vae(tiny_sd3_dir: Path) -> torch.nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(tiny_sd3_dir / "vae")


def test_same_seed_same_weights_and_another_seed_other_weights(tiny_sd3_dir: Path, tmp_path: Path):
    again = tiny_sd3.build(tmp_path / "again" / tiny_sd3.DEFAULT_NAME, seed=0)
    other = tiny_sd3.build(tmp_path / "other" / tiny_sd3.DEFAULT_NAME, seed=1)
    assert _digests(again) == _digests(tiny_sd3_dir)
    changed = {name for name, digest in _digests(other).items() if digest != _digests(again)[name]}
    assert {"transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"} <= changed


def test_building_leaves_the_random_state_alone(tmp_path: Path):
    before = torch.get_rng_state()
    tiny_sd3.build(tmp_path / tiny_sd3.DEFAULT_NAME)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_name_that_sglang_would_not_recognise_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="must contain 'stable-diffusion-3-medium'"):
        tiny_sd3.build(tmp_path / "model")


def test_weights_are_fp32_and_few(tiny_sd3_dir: Path):
    module = families.resolve(tiny_sd3_dir).load_component(tiny_sd3_dir, "transformer", torch.float32)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in module.parameters()) < 1_000_000


@torch.no_grad()
def test_vae_is_linear_and_inverts_itself(vae):
    torch.manual_seed(0)
    first, second = torch.randn(2, 1, 4, 8, 8)
    apart = vae.decode(first).sample + vae.decode(second).sample
    assert torch.allclose(vae.decode(first + second).sample, apart, atol=2e-3)
    cells = torch.rand(2, 3, 8, 8).mul(2).sub(1).repeat_interleave(8, 2).repeat_interleave(8, 3)
    assert torch.allclose(vae.decode(vae.encode(cells).latent_dist.mean).sample, cells, atol=5e-3)


@torch.no_grad()
def test_noise_becomes_pictures_of_different_colours(vae):
    torch.manual_seed(0)
    pictures = (vae.decode(torch.randn(32, 4, 8, 8)).sample / 2 + 0.5).clamp(0, 1)
    assert pictures.mean((2, 3)).std(0).min() > 0.1  # of [0, 1], for each colour, between samples
    assert ((pictures == 0) | (pictures == 1)).float().mean() < 0.2


@torch.no_grad()
def test_the_denoiser_listens_to_its_conditioning(tiny_sd3_dir: Path):
    family = families.resolve(tiny_sd3_dir)
    module = family.load_component(tiny_sd3_dir, "transformer", torch.float32)
    torch.manual_seed(0)
    latent = torch.randn(1, 4, 8, 8).repeat(2, 1, 1, 1)
    conditioning = {"encoder_hidden_states": 4 * torch.randn(2, 333, 64), "pooled_projections": 4 * torch.randn(2, 64)}
    one, two = family.predict(module, latent, torch.full((2,), 500.0), conditioning)
    assert (one - two).std() > 0.1 * one.std()


def _digests(root: Path) -> dict[str, str]:
    files = sorted(root.rglob("*.safetensors"))
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
