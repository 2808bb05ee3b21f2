"""`headwater submit "a red circle" -n 4 --out DIR`: generate images of one prompt through the running services."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import options, output

if TYPE_CHECKING:
    from headwater.client import Group

_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "video/mp4": ".mp4"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("submit", help="generate images of a prompt", description=__doc__)
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help='e.g. "a red circle"')
    add("-n", "--count", metavar="N", type=int, default=1, help="images (default 1)")
    add("--out", metavar="DIR", type=Path, required=True, help="folder for the images and results.json")
    add("--rewards", metavar="NAMES", default="", help="rewards to compute, e.g. ocr,color_shape")
    add("--seed", metavar="S", type=int, help="seeds S, S+1, … instead of random ones")
    add("--steps", metavar="N", type=int, default=10, help="denoise steps (default %(default)s)")
    add("--size", metavar="PX", type=int, default=64, help="height and width in pixels (default %(default)s)")
    add("--guidance-scale", metavar="G", type=float, default=1.0, help="1 means no guidance (default %(default)s)")
    add("--negative-prompt", metavar="TEXT", default="", help="used with guidance")
    add("--timeout", metavar="S", type=float, default=600.0, help="longest wait in seconds (default %(default)s)")
    options.add_router(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Submit, save, report."""
    from headwater.client import Client
    from headwater.errors import InvalidArgument

    if args.count < 1:
        raise InvalidArgument(f"-n is {args.count}; ask for at least 1 image", field="count")
    if args.seed is not None and args.seed < 0:
        raise InvalidArgument(f"--seed is {args.seed}; it must be at least 0", field="seed")
    seeds = [] if args.seed is None else range(args.seed, args.seed + args.count)
    with Client(args.router) as client:
        group = client.submit(
            args.prompt,
            n=args.count,
            seeds=seeds,
            rewards=[name for name in args.rewards.split(",") if name],
            steps=args.steps,
            height_px=args.size,
            width_px=args.size,
            guidance_scale=args.guidance_scale,
            negative_prompt=args.negative_prompt,
            timeout_s=args.timeout,
        )
    results = save(group, args.out)
    for sample in results["samples"]:
        scores = "  ".join(f"{name} {score:.4f}" for name, score in sample["rewards"].items())
        print(f"{args.out / sample['file']}  seed {sample['seed']}  weights {sample['weight_step']}  {scores}".rstrip())
    if args.json:
        output.print_json(results)
    return 0


def save(group: "Group", folder: Path) -> dict[str, Any]:
    """Write the images and results.json; returns what results.json holds."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    for index, sample in enumerate(group.samples):
        name = f"{index:03d}{_SUFFIXES.get(sample.mime_type, '.bin')}"
        (folder / name).write_bytes(sample.image_bytes)
        samples.append(
            {
                "file": name,
                "seed": sample.seed,
                "rewards": sample.rewards,
                "reward_errors": {key: error.message for key, error in sample.reward_errors.items()},
                "total_reward": sample.total_reward,
                "weight_run_id": sample.weight_version.run_id,
                "weight_step": sample.weight_version.step,
            }
        )
    results = {
        "prompt": group.prompt,
        "request_id": group.request_id,
        "worker_id": group.worker_id,
        "out": str(folder),
        "samples": samples,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results
