"""Accuracy of pipelines on tiny-geneval prompts, by tag, without services: sample, then verify with OpenCV.

    python scripts/score_tiny_geneval.py MODEL … --prompts recipes/prompts/tiny_geneval_eval.jsonl --per-prompt 4

Prints one JSON line per model; `--grid DIR` also writes a picture grid of each.
"""

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from headwater_reward.rewards.tiny_geneval import evaluate
from headwater_trainer.model import Policy
from headwater_trainer.pictures import denoise, save_grid
from torch import Tensor

from headwater.diffusion import families
from headwater.diffusion.schedules import schedule
from headwater.synthetic import Requirements

_BATCH = 480


@torch.no_grad()
def draw(model: Path, prompts: list[str], *, steps: int, guidance: float, seed: int, device: torch.device) -> Tensor:
    """uint8 [n, H, W, 3], one picture a prompt, by the deterministic sampler."""
    family = families.resolve(model)
    codec = family.codec(model, device)
    policy = Policy(
        family=family, component="transformer", reference_copy=None, guidance_scale=guidance, autocast=False,
        module=family.load_component(model, "transformer", torch.float32).to(device), device=device,
    )  # fmt: skip
    sigmas = schedule(families.scheduler_config(model), steps).sigmas
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(prompts), *family.latent_shape(model, 64, 64), generator=generator)
    pictures = []
    for begin in range(0, len(prompts), _BATCH):
        part = prompts[begin : begin + _BATCH]
        negative = codec.encode_text([""] * len(part)) if guidance > 1 else {}
        latents = denoise(policy, sigmas, noise[begin : begin + _BATCH], codec.encode_text(part), negative)
        pictures.append(codec.decode(latents))
    return torch.cat(pictures)


def verify(job: tuple[np.ndarray, dict[str, Any]]) -> tuple[str, float, float]:
    """(tag, strict score, partial score) of a picture and the metadata of its prompt."""
    picture, metadata = job
    wanted = Requirements.from_metadata(metadata)
    parts = list(evaluate(picture, wanted).values())
    return wanted.tag, float(all(part == 1.0 for part in parts)), sum(parts) / len(parts)


def figures(scores: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Accuracy overall (pictures) and by tag, its 95 % half-width, and the mean partial score."""
    tags = sorted({tag for tag, _, _ in scores})
    strict = [score for _, score, _ in scores]
    accuracy = sum(strict) / len(strict)
    by_tag = {tag: [score for one, score, _ in scores if one == tag] for tag in tags}
    return {
        "accuracy": round(accuracy, 4),
        "half_width_95": round(1.96 * math.sqrt(accuracy * (1 - accuracy) / len(strict)), 4),
        "partial": round(sum(partial for _, _, partial in scores) / len(scores), 4),
        "pictures": len(scores),
        **{f"tag_{tag}": round(sum(values) / len(values), 4) for tag, values in by_tag.items()},
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt and metadata")
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts")
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--grid", type=Path, help="folder for a PNG of the first pictures of each model")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[: arguments.limit]
    entries = [json.loads(line) for line in lines for _ in range(arguments.per_prompt)]
    prompts = [entry["prompt"] for entry in entries]
    with ProcessPoolExecutor(arguments.processes) as pool:
        for model in arguments.models:
            begun = time.monotonic()
            pictures = draw(
                model, prompts, steps=arguments.steps, guidance=arguments.guidance, seed=arguments.seed, device=device
            )
            jobs = zip(pictures.numpy(), (entry["metadata"] for entry in entries), strict=True)
            result = figures(list(pool.map(verify, jobs, chunksize=16)))
            shown = {"model": str(model), "steps": arguments.steps, "guidance": arguments.guidance}
            print(json.dumps({**shown, **result, "seconds": round(time.monotonic() - begun, 1)}), flush=True)
            if arguments.grid:
                save_grid(pictures[:: arguments.per_prompt][:48], arguments.grid / f"{model.name}.png")


if __name__ == "__main__":
    main()
