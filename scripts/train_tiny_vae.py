"""Train the VAE of the model in the box on drawn pictures.

    python scripts/train_tiny_vae.py OUT --count 100000 --steps 8000

Writes an AutoencoderKL in fp16 whose latents have mean 0 and standard deviation 1 over the data.
"""

import argparse
from pathlib import Path

import numpy as np

from headwater.synthetic.batches import batches


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder that gets the VAE")
    parser.add_argument("--count", type=int, default=100_000, help="pictures (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--kl-weight", type=float, default=3e-4)
    parser.add_argument("--processes", type=int, default=4, help="that draw pictures")
    arguments = parser.parse_args()
    drawn = batches(arguments.count, seed=arguments.seed, processes=arguments.processes)
    pictures = np.concatenate([some for some, _ in drawn])

    import torch  # here: the processes that draw import this file and need none of it

    from headwater.diffusion.tiny_vae import make_vae, normalise, train

    torch.manual_seed(arguments.seed)
    pixels = torch.from_numpy(pictures).to("cuda" if torch.cuda.is_available() else "cpu")
    vae = make_vae()
    train(
        vae, pixels, steps=arguments.steps, batch_size=arguments.batch_size, lr=arguments.lr,
        kl_weight=arguments.kl_weight,
    )  # fmt: skip
    normalise(vae, pixels)
    vae.half().to("cpu", memory_format=torch.contiguous_format).save_pretrained(arguments.out)
    print(f"{arguments.out}: {sum(weight.numel() for weight in vae.parameters())} parameters")


if __name__ == "__main__":
    main()
