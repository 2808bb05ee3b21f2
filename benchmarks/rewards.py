"""How many images a second a reward server scores, against the server that the field usually writes; and two servers.

    python benchmarks/rewards.py --json

The usual server is below, written with the standard library: one process, one request at a time, images as a PICKLE of
JPEG bytes over HTTP. THE PICKLE IS THE BASELINE'S, NOT OURS: whoever can reach such a server can run any code in it.
It listens on 127.0.0.1 only, and nothing of Headwater unpickles anything. Both run the same CLIP model with random
weights, in fp32, with the same threads, on the same CPU, under the same number of concurrent requests of one image.
"""

import argparse
import asyncio
import http.client
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = {  # width, layers, heads of the image tower; of the text tower; patch
    "b32": ((768, 12, 12), (512, 12, 8), 32),  # CLIP ViT-B/32
    "small": ((384, 6, 6), (256, 6, 4), 32),
}
PROMPT = "a red circle left of a blue square"
SLEEP_S = 0.02


def save_model(folder: Path, size: str) -> None:
    """A CLIP model with random weights."""
    import torch

    from headwater.diffusion import tiny_sd3  # first: it repairs torchvision

    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel  # isort: skip

    vocabulary = tiny_sd3._save_clip_tokenizer(folder)
    (width, layers, heads), (text_width, text_layers, text_heads), patch = SIZES[size]
    end = vocabulary["<|endoftext|>"]
    text = {
        "vocab_size": len(vocabulary), "hidden_size": text_width, "intermediate_size": 4 * text_width,
        "num_hidden_layers": text_layers, "num_attention_heads": text_heads, "eos_token_id": end, "pad_token_id": end,
        "bos_token_id": vocabulary["<|startoftext|>"],
    }  # fmt: skip
    vision = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "patch_size": patch, "image_size": 224,
    }  # fmt: skip
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)


def jpeg(seed: int) -> bytes:
    """A 512-pixel image."""
    small = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((512, 512), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def serve_usual(folder: str, threads: int) -> None:
    """The usual server: unpickle, decode, score, answer; then the next request."""
    import torch

    from headwater.diffusion import torchvision_ops

    torchvision_ops.declare_missing()
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    torch.set_num_threads(threads)
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer, processor = CLIPTokenizer.from_pretrained(folder), CLIPImageProcessorPil.from_pretrained(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            request = pickle.loads(body)  # THE BASELINE'S: never do this
            images = [Image.open(io.BytesIO(data)).convert("RGB") for data in request["images"]]
            inputs = processor(images=images, return_tensors="pt")
            tokens = tokenizer(request["prompts"], padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                scores = model(**inputs, **tokens).logits_per_image.diagonal().tolist()
            answer = pickle.dumps({"scores": scores})
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    class Usual(HTTPServer):
        request_queue_size = 256

    server = Usual(("127.0.0.1", 0), Handler)
    print(f"listens on 127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


async def serve_sleeping() -> None:
    """A reward server whose reward sleeps `SLEEP_S` a sample."""
    from headwater_reward.config import RewardConfig
    from headwater_reward.registry import Score
    from headwater_reward.rewards.color_shape import ColorShapeReward
    from headwater_reward.service import RewardService

    from headwater.reward.v1 import reward_pb2_grpc
    from headwater.rpc.server import Server, serve_until_signal

    class Sleeping(ColorShapeReward):
        name = "sleeping"

        def score(self, batch):
            time.sleep(SLEEP_S * len(batch))
            return [Score(1.0)] * len(batch)

    service = RewardService([Sleeping()], RewardConfig())
    server = Server("127.0.0.1:0", name="reward")
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, service, "headwater.reward.v1.RewardService")
    address = await server.start()
    await service.load()
    await server.set_serving(True)
    print(f"listens on {address}", flush=True)
    await serve_until_signal(server, drain=service.drain)


class Started:
    """A server in a process of its own, once it says where it listens and, with `ready`, that."""

    def __init__(self, *command: str, ready: str = "listens on") -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.address = ""
        for line in self.process.stdout:
            if "listens on " in line:
                self.address = line.split("listens on ")[1].split()[0]
            if ready in line:
                return
        raise SystemExit(f"{command} has not started")

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *args) -> None:
        self.process.terminate()
        self.process.wait(30)


def measure_usual(address: str, images: list[bytes], at_once: int) -> float:
    """Images a second."""

    def one(data: bytes) -> None:
        connection = http.client.HTTPConnection(address, timeout=300)
        connection.request("POST", "/", pickle.dumps({"images": [data], "prompts": [PROMPT]}))
        assert len(pickle.loads(connection.getresponse().read())["scores"]) == 1  # the baseline's own server
        connection.close()

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, images[:4]))
        started = time.monotonic()
        list(pool.map(one, images))
    return len(images) / (time.monotonic() - started)


async def measure_ours(addresses: list[str], images: list[bytes], at_once: int, reward: str) -> float:
    """Images a second over one or several servers, in turn."""
    from headwater.common.v1.sample_pb2 import Media
    from headwater.reward.v1.reward_pb2 import ScoreGroupRequest
    from headwater.reward.v1.reward_pb2_grpc import RewardServiceStub
    from headwater.rpc.channel import aio_channel

    channels = [aio_channel(address) for address in addresses]
    stubs, slots = [RewardServiceStub(channel) for channel in channels], asyncio.Semaphore(at_once)

    async def one(i: int, data: bytes) -> None:
        request = ScoreGroupRequest(prompt=PROMPT, media=[Media(mime_type="image/jpeg", data=data)])
        request.rewards.add(name=reward)
        async with slots:
            response = await stubs[i % len(stubs)].ScoreGroup(request, timeout=300)
        assert response.samples[0].scores[0].WhichOneof("outcome") == "value", response

    await asyncio.gather(*(one(i, data) for i, data in enumerate(images[:4])))
    started = time.monotonic()
    await asyncio.gather(*(one(i, data) for i, data in enumerate(images)))
    rate = len(images) / (time.monotonic() - started)
    await asyncio.gather(*(channel.close() for channel in channels))
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--size", choices=sorted(SIZES), default="b32")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--serve-usual", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--serve-sleeping", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_usual:
        return serve_usual(args.serve_usual, args.threads)
    if args.serve_sleeping:
        return asyncio.run(serve_sleeping())
    images, threads = [jpeg(i) for i in range(args.images)], str(args.threads)
    figures: dict[str, float | str | int] = {"model": args.size, "at_once": args.at_once, "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.size)
        with Started(__file__, "--serve-usual", folder, "--threads", threads) as usual:
            figures["usual_images_per_s"] = measure_usual(usual.address, images, args.at_once)
        table = Path(folder, "rewards.toml")
        table.write_text(f'[hpsv2]\nmodel = "{folder}"\nmax_batch = {args.max_batch}\nthreads = {threads}\n')
        command = ("-m", "headwater_reward", "--bind", "127.0.0.1:0", "--reward-config", str(table))
        with Started(*command, ready="checked rewards") as ours:
            rate = asyncio.run(measure_ours([ours.address], images, args.at_once, "hpsv2"))
            figures["headwater_images_per_s"] = rate
    figures["speedup"] = figures["headwater_images_per_s"] / figures["usual_images_per_s"]
    with Started(__file__, "--serve-sleeping") as first, Started(__file__, "--serve-sleeping") as second:
        for name, servers in (("one", [first]), ("two", [first, second])):
            addresses = [server.address for server in servers]
            rate = asyncio.run(measure_ours(addresses, images, args.at_once, "sleeping"))
            figures[f"{name}_sleeping_images_per_s"] = rate
    figures["scaling"] = figures["two_sleeping_images_per_s"] / figures["one_sleeping_images_per_s"]
    for name, value in figures.items():
        print(f"{name:28}{value:.2f}" if isinstance(value, float) else f"{name:28}{value}")
    if args.json:
        print(json.dumps(figures))
    return None


if __name__ == "__main__":
    main()
