"""`python -m headwater.synthetic pairs OUT …` writes pictures with captions, `prompts TRAIN EVAL …` writes prompts."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from headwater.synthetic.generate import prompt, sample
from headwater.synthetic.scene import SHAPE_TAGS, TAGS
from headwater.synthetic.split import SPLITS

MAX_TRIES_PER_PROMPT = 500


def write_pairs(out: Path, *, count: int, seed: int, split: str, size_px: int, tags: Sequence[str]) -> None:
    """`out`/pairs.jsonl, one {"image": path below `out`, "prompt": …, "metadata": …} a line, and PNG files."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    with (out / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for index in range(count):
            pair = sample(seed, index, split, size_px=size_px, tags=tags)
            name = f"images/{index:06d}.png"
            Image.fromarray(pair.image_HWC).save(out / name, compress_level=1)
            file.write(json.dumps({"image": name, "prompt": pair.caption, "metadata": pair.metadata}) + "\n")


def different_prompts(count: int, *, seed: int, split: str, tags: Sequence[str]) -> list[dict[str, Any]]:
    """At most `count` different prompts, the tags by turns so that every beginning of the list is balanced."""
    per_tag = [list(_of_one_tag(-(-count // len(tags)), seed, split, tag)) for tag in tags]
    longest = max(len(prompts) for prompts in per_tag)
    return [prompts[k] for k in range(longest) for prompts in per_tag if k < len(prompts)][:count]


def _of_one_tag(count: int, seed: int, split: str, tag: str) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for index in range(count * MAX_TRIES_PER_PROMPT):
        text, metadata = prompt(seed, index, split, (tag,))
        if text not in seen:
            seen.add(text)
            yield {"prompt": text, "metadata": metadata}
        if len(seen) == count:
            return


def write_prompts(path: Path, prompts: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line, as a recipe's `prompts.path` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in prompts), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headwater.synthetic", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    pairs = commands.add_parser("pairs", help="pictures with captions, for supervised training")
    pairs.add_argument("out", type=Path, metavar="OUT", help="folder that gets pairs.jsonl and images/")
    pairs.add_argument("--count", type=_positive, default=1000)
    pairs.add_argument("--split", choices=SPLITS, default="train")
    pairs.add_argument("--size-px", type=_positive, default=64)
    prompts = commands.add_parser("prompts", help="prompts for training and for held-out evaluation")
    prompts.add_argument("train", type=Path, metavar="TRAIN", help="JSONL file for the training prompts")
    prompts.add_argument("eval", type=Path, metavar="EVAL", help="JSONL file for the evaluation prompts")
    prompts.add_argument("--train-count", type=_positive, default=600)
    prompts.add_argument("--eval-count", type=_positive, default=240)
    for command, tags in ((pairs, TAGS), (prompts, SHAPE_TAGS)):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--tags", nargs="+", choices=TAGS, default=tags, help=f"default: {' '.join(tags)}")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = _parser().parse_args(argv)
    started = time.monotonic()
    if args.command == "pairs":
        write_pairs(
            args.out, count=args.count, seed=args.seed, split=args.split, size_px=args.size_px, tags=args.tags
        )  # fmt: skip
        print(f"{args.count} pairs in {args.out} ({time.monotonic() - started:.1f} s)", file=sys.stderr)
        return
    for path, split, count in ((args.train, "train", args.train_count), (args.eval, "eval", args.eval_count)):
        prompts = different_prompts(count, seed=args.seed, split=split, tags=args.tags)
        write_prompts(path, prompts)
        print(f"{len(prompts)} prompts in {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
