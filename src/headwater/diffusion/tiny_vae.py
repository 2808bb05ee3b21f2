"""The VAE of the model in the box and its training: L1 on pixels and on their differences, and a little KL."""

import math
import time

import torch
from torch import Tensor

from headwater.diffusion.families.codec import from_pixels

# isort: off
from diffusers import AutoencoderKL
# isort: on

LATENT_CHANNELS = 8


def make_vae() -> AutoencoderKL:
    """8 x 8 pixels to one latent of 8 channels."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        sample_size=64,
        block_out_channels=(16, 24, 40, 40),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def loss_of(vae: AutoencoderKL, images: Tensor, kl_weight: float) -> tuple[Tensor, Tensor]:
    """Loss and mean absolute error (in [0, 1]) of images [B, 3, H, W] in [-1, 1]."""
    posterior = vae.encode(images).latent_dist
    decoded = vae.decode(posterior.sample()).sample.float()
    error = (decoded - images).abs().mean()
    edges = sum((decoded.diff(dim=dim) - images.diff(dim=dim)).abs().mean() for dim in (2, 3))
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error + edges + kl_weight * kl, error.detach() / 2


def train(vae: AutoencoderKL, pixels: Tensor, *, steps: int, batch_size: int, lr: float, kl_weight: float) -> None:
    """Train on `pixels` uint8 [N, H, W, 3], on their device."""
    device = pixels.device
    vae.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        index = torch.randint(len(pixels), (batch_size,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, error = loss_of(vae, from_pixels(pixels[index]), kl_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, steps // 10) == 0:
            print(f"vae step={step} error={error:.4f} seconds={time.monotonic() - begun:.0f}", flush=True)


@torch.no_grad()
def normalise(vae: AutoencoderKL, pixels: Tensor) -> None:
    """Set shift and scale so that latents have mean 0 and deviation 1; report the error of fp16 weights."""
    vae.eval().half().float()
    parts = [from_pixels(chunk) for chunk in pixels[:4096].split(256)]
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in parts])
    mean, std = float(latents.mean()), float(latents.std())
    decoded = torch.cat([vae.decode(chunk).sample for chunk in latents.split(256)])
    error = float((decoded.clamp(-1, 1) - torch.cat(parts)).abs().mean()) / 2
    vae.register_to_config(shift_factor=mean, scaling_factor=1 / std)
    noise = float(torch.cat([vae.encode(part).latent_dist.std for part in parts[:1]]).mean())
    psnr = -10 * math.log10(float((decoded.clamp(-1, 1) - torch.cat(parts)).div(2).square().mean()))
    print(
        f"vae latents mean={mean:.3f} std={std:.3f} noise={noise:.3f} error={error:.4f} psnr={psnr:.1f} dB", flush=True
    )
