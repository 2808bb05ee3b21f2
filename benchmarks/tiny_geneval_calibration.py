"""How often `tiny-geneval` agrees with what was drawn: accepts true drawings, rejects wrong ones, per tag.

python benchmarks/tiny_geneval_calibration.py [--count 1000] [--seed 0] [--vae DIR] [--json FILE]

Each drawing is judged as drawn and after three kinds of damage as the reconstruction of an 8x-down VAE does. A wrong
drawing is a true one judged for a prompt that differs in one thing: colour, shape, count or position; or one with one
more object. Shares of right answers are printed; `ms` is the time per image.
"""

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
from headwater_reward.rewards.tiny_geneval import evaluate
from PIL import Image

from headwater.synthetic import Requirements, sample
from headwater.synthetic.scene import COLORS, MAX_COUNT, OPPOSITE, RELATIONS, SHAPE_TAGS, SHAPES


def blur(image_HWC, rng, sigma_px):
    """Gaussian blur, a gain and an offset per channel (colour error) and noise."""
    image = cv2.GaussianBlur(image_HWC.astype(np.float32), (0, 0), sigma_px)
    image = image * rng.uniform(0.95, 1.05, 3) + rng.uniform(-10, 10, 3) + rng.normal(0, 4, image.shape)
    return image.clip(0, 255).round().astype(np.uint8)


def jpeg(image_HWC, rng):
    ok, data = cv2.imencode(".jpg", image_HWC[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 50])
    assert ok
    return np.ascontiguousarray(cv2.imdecode(data, cv2.IMREAD_COLOR)[..., ::-1])


DAMAGES = {
    "drawn": lambda image, rng: image,
    "blur 0.7": lambda image, rng: blur(image, rng, 0.7),
    "blur 1.0": lambda image, rng: blur(image, rng, 1.0),
    "jpeg 50": jpeg,
}


def reconstruction(folder):
    """Damage by a real VAE in the diffusers format: encode, decode."""
    import torch

    import headwater.diffusion  # noqa: F401 -- before diffusers
    from diffusers import AutoencoderKL  # isort: skip

    vae = AutoencoderKL.from_pretrained(folder).float().eval()

    @torch.no_grad()
    def damage(image_HWC, rng):
        pixels = torch.from_numpy(image_HWC).permute(2, 0, 1)[None].float() / 127.5 - 1
        decoded = vae.decode(vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1)
        return ((decoded[0].permute(1, 2, 0) + 1) * 127.5).round().byte().contiguous().numpy()

    return damage


def wrong(image_HWC, wanted, rng):
    """(what is wrong, image, requirements) triples, one per thing that can be wrong."""
    k = rng.integers(len(wanted.objects))
    one, rest = wanted.objects[k], [o for i, o in enumerate(wanted.objects) if i != k]

    def but(**changes):
        objects = list(wanted.objects)
        objects[k] = dataclasses.replace(one, **changes)
        return dataclasses.replace(wanted, objects=tuple(objects))

    shapes = [s for s in SHAPES if s != one.shape and (one.color or all(s != o.shape for o in rest))]
    yield "shape", image_HWC, but(shape=str(rng.choice(shapes)))
    if one.color:
        yield "color", image_HWC, but(color=str(rng.choice([c for c in COLORS if c != one.color])))
    counts = [n for n in (one.count - 1, one.count + 1) if 1 <= n <= MAX_COUNT]
    yield "count", image_HWC, but(count=int(rng.choice(counts)))
    if wanted.relation:
        relation = str(rng.choice([r for r in RELATIONS if r != wanted.relation]))
        yield "position", image_HWC, dataclasses.replace(wanted, relation=relation)
        yield "position", image_HWC, dataclasses.replace(wanted, relation=OPPOSITE[wanted.relation])
    if len(wanted.objects) == 2 and one.color != rest[0].color and one.shape != rest[0].shape:
        a, b = wanted.objects
        swapped = (dataclasses.replace(a, color=b.color), dataclasses.replace(b, color=a.color))
        yield "swapped colors", image_HWC, dataclasses.replace(wanted, objects=swapped)
    yield "one more", with_one_more(image_HWC, rng), wanted


def with_one_more(image_HWC, rng):
    """A disc of 9 pixels where it touches nothing; the image itself when it is full."""
    busy = np.abs(image_HWC.astype(int) - image_HWC[0, 0]).max(axis=-1) > 60  # the gradients differ by at most 65
    free = cv2.distanceTransform((~np.pad(busy, 1, constant_values=True)).astype(np.uint8), cv2.DIST_L2, 5)[1:-1, 1:-1]
    y, x = np.unravel_index(np.argmax(free), free.shape)
    if free[y, x] < 8:
        return np.zeros_like(image_HWC)
    color = list(COLORS.values())[rng.integers(len(COLORS))]
    return cv2.circle(image_HWC.copy(), (int(x), int(y)), 5, color, cv2.FILLED, cv2.LINE_AA)


def measure(count, seed, damages=tuple(DAMAGES)):
    """{"accepts": {damage: {tag: [share, number]}}, "rejects": {damage: {what: [share, number]}}, "ms": time}."""
    cv2.setNumThreads(1)
    rng = np.random.default_rng(seed)
    accepts, rejects = (defaultdict(lambda: defaultdict(list)) for _ in range(2))
    calls, began = 0, time.process_time()
    for index in range(count):
        pair = sample(seed, index, ("train", "eval")[index % 2], tags=SHAPE_TAGS)
        wanted = Requirements.from_metadata(pair.metadata)
        others = list(wrong(pair.image_HWC, wanted, rng))
        for name in damages:
            damage = DAMAGES[name]
            accepts[name][wanted.tag].append(judge(damage(pair.image_HWC, rng), wanted))
            for what, image, asked in others:
                rejects[name][what].append(not judge(damage(image, rng), asked))
            calls += 1 + len(others)
    ms = (time.process_time() - began) * 1e3 / calls
    return {"accepts": shares(accepts), "rejects": shares(rejects), "ms": round(ms, 2), "images": calls}


def judge(image_HWC, wanted):
    return all(part == 1.0 for part in evaluate(image_HWC, wanted).values())


def shares(answers):
    return {
        name: {key: [round(float(np.mean(values)), 4), len(values)] for key, values in sorted(by_key.items())}
        for name, by_key in answers.items()
    }


def sheet(path, seed, columns=12, rows=8):
    """A picture of the first drawings."""
    images = [sample(seed, k).image_HWC for k in range(columns * rows)]
    lines = [np.hstack(images[r * columns : (r + 1) * columns]) for r in range(rows)]
    Image.fromarray(np.vstack(lines)).save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae", type=Path, help="also judge reconstructions of this VAE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sheet", type=Path, help="also write a picture of the first 96 drawings here")
    args = parser.parse_args()
    if args.vae:
        DAMAGES["vae"] = reconstruction(args.vae)
    result = measure(args.count, args.seed, tuple(DAMAGES))
    for part in ("accepts", "rejects"):
        for name, by_key in result[part].items():
            cells = "  ".join(f"{key} {share:.4f} ({number})" for key, (share, number) in by_key.items())
            print(f"{part:8}{name:10}{cells}")
    print(f"{result['ms']} ms per image, with the damage")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.sheet:
        sheet(args.sheet, args.seed)


if __name__ == "__main__":
    main()
