"""Generation through the engine of a rollout worker, against diffusers' own pipeline on the same model in the same run.

python benchmarks/rollout.py [--model DIR] [-n 16] [--steps 10] [--size 64] [--repeats 5] [--engine sglang] [--json]

The engine samples with SDE noise on all steps but the last and records latents, log-probabilities and conditioning for
training; diffusers' pipeline only makes pictures. `ratio` is engine time over pipeline time (medians).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import GroupRequest

from headwater.common.v1.sampling_pb2 import SamplingParams, TransitionParams
from headwater.diffusion import tiny_sd3
from headwater.sampling import resolve

PROMPT = "a red circle"


def timed(work, repeats):
    work()  # warm up
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def engine_s(args, model, device):
    engine = load_engine(args.engine, model, "fp32", device)
    params = SamplingParams(
        steps=args.steps, height_px=args.size, width_px=args.size, transition=TransitionParams(noise_level=0.7)
    )
    request = GroupRequest(PROMPT, tuple(range(args.n)), resolve(params, group_seed=0))
    return timed(lambda: engine.generate(request), args.repeats)


def pipeline_s(args, model, device):
    import diffusers

    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(model, torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)

    def run():
        pipeline(
            PROMPT, num_images_per_prompt=args.n, num_inference_steps=args.steps, height=args.size, width=args.size,
            guidance_scale=1.0,
        )  # fmt: skip

    return timed(run, args.repeats)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="pipeline folder; absent: a tiny one with random weights")
    parser.add_argument("-n", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=("sglang", "diffusers"), default="sglang")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model) if args.model else tiny_sd3.build(Path(folder) / tiny_sd3.DEFAULT_NAME)
        engine, pipeline = engine_s(args, model, device), pipeline_s(args, model, device)
    figures = {
        "engine": args.engine, "device": device, "n": args.n, "steps": args.steps, "engine_s": engine,
        "engine_images_per_s": args.n / engine, "pipeline_s": pipeline, "ratio": engine / pipeline,
    }  # fmt: skip
    print("\n".join(f"{key:20} {value}" for key, value in figures.items()))
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
