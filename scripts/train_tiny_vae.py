"""Train the VAE of the model in the box on drawn pictures: L1 on pixels and on their differences, and a little KL.

    python scripts/train_tiny_vae.py OUT --count 100000 --steps 6000

Writes an AutoencoderKL in fp16 whose latents have mean 0 and standard deviation 1 over the data.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import headwater.diffusion  # noqa: F401  before diffusers: declares what torchvision may lack
from headwater.diffusion.families.codec import from_pixels
from headwater.synthetic.batches import batches

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


def train(vae: AutoencoderKL, pixels: Tensor, arguments: argparse.Namespace) -> None:
    """Train on `pixels` uint8 [N, H, W, 3], on their device."""
    device = pixels.device
    vae.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=arguments.lr, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, arguments.steps, pct_start=0.1)
    begun = time.monotonic()
    for step in range(1, arguments.steps + 1):
        index = torch.randint(len(pixels), (arguments.batch_size,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, error = loss_of(vae, from_pixels(pixels[index]), arguments.kl_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, arguments.steps // 10) == 0:
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


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder that gets the VAE")
    parser.add_argument("--count", type=int, default=100_000, help="pictures (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--kl-weight", type=float, default=3e-4)
    parser.add_argument("--processes", type=int, default=4, help="that draw pictures")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drawn = batches(arguments.count, seed=arguments.seed, processes=arguments.processes)
    pixels = torch.from_numpy(np.concatenate([pictures for pictures, _ in drawn])).to(device)
    vae = make_vae()
    train(vae, pixels, arguments)
    normalise(vae, pixels)
    vae.half().to("cpu", memory_format=torch.contiguous_format).save_pretrained(arguments.out)
    print(f"{arguments.out}: {sum(weight.numel() for weight in vae.parameters())} parameters")


if __name__ == "__main__":
    main()
