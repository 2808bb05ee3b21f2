"""The VAE of the model in the box and its training: L1 on pixels and on their differences, and a little KL."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

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
    """Loss and mean absolute error (in [0, 1]) of images [B, 3, H, W] in [-1, 1].

    Squares count beside absolute values: small objects in a wrong colour are what matters, and most of a picture is its
    background.
    """
    posterior = vae.encode(images).latent_dist
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    latents = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
    difference = vae.decode(latents).sample.float() - images
    error = difference.abs().mean()
    edges = difference.diff(dim=2).abs().mean() + difference.diff(dim=3).abs().mean()
    cells = avg_pool2d(difference, 8).square().mean()  # the colours of 8 x 8 pixels
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error + edges + 4 * difference.square().mean() + 8 * cells + kl_weight * kl, error.detach() / 2


def train(vae: AutoencoderKL, pixels: Tensor, *, steps: int, batch_size: int, lr: float, kl_weight: float) -> None:
    """Train on `pixels` uint8 [N, H, W, 3], on their device; on a GPU forward and backward are one CUDA graph."""
    device = pixels.device
    vae.to(device, memory_format=torch.channels_last).train()
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=1e-4, fused=on_gpu)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)

    def attempt(images: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss, error = loss_of(vae, images, kl_weight)
        loss.backward()
        return error

    def batch() -> Tensor:
        return from_pixels(pixels[torch.randint(len(pixels), (batch_size,), device=device)])

    graphed = _graphed(attempt, batch(), vae) if on_gpu else None
    begun = time.monotonic()
    for step in range(1, steps + 1):
        if graphed is None:
            vae.zero_grad(set_to_none=True)
            error = attempt(batch())
        else:
            graph, inputs, error = graphed
            inputs.copy_(batch())
            graph.replay()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 10) == 0:
            print(f"vae step={step} error={float(error):.4f} seconds={time.monotonic() - begun:.0f}", flush=True)
    vae.zero_grad(set_to_none=True)


def _graphed(
    attempt: Callable[[Tensor], Tensor], images: Tensor, vae: AutoencoderKL
) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """Forward and backward recorded: the graph, its input, and its figure."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            vae.zero_grad(set_to_none=True)
            attempt(images)
    torch.cuda.current_stream().wait_stream(side)
    vae.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        error = attempt(images)
    return graph, images, error


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
