"""Requests that no client of ours would send, at a reward server in a process of its own.

    python tests/reward_fuzz.py --count 20000

Every call must end within its deadline with an answer or a status that says what was wrong, the server must still score
afterwards, and its memory must not grow by more than 5 % after a first quarter of the calls.
"""

import argparse
import asyncio
import io
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
from google.protobuf.struct_pb2 import Struct
from PIL import Image

from headwater.common.v1.sample_pb2 import Media
from headwater.reward.v1.reward_pb2 import ScoreGroupRequest
from headwater.reward.v1.reward_pb2_grpc import RewardServiceStub
from headwater.rpc.channel import aio_channel
from headwater.tensors import codec

METHOD = "/headwater.reward.v1.RewardService/ScoreGroup"
REWARDS = ("color_shape", "jpeg_compressibility", "tiny-geneval")
AT_ONCE, CALL_TIMEOUT_S = 8, 30.0
FINE = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"}
UNREADABLE = "UNKNOWN"  # gRPC's own answer to bytes that are no message


def encoded(kind: str = "PNG", size: int = 48) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(size).integers(0, 256, (size, size, 3), np.uint8)).save(buffer, kind)
    return buffer.getvalue()


IMAGES = [("image/png", encoded("PNG")), ("image/jpeg", encoded("JPEG")), ("image/webp", encoded("WEBP"))]


def good(rng: random.Random) -> ScoreGroupRequest:
    request = ScoreGroupRequest(group_id="g", prompt=rng.choice(["a red circle", "two blue squares", "?", ""]))
    for _ in range(rng.randint(1, 3)):
        mime_type, data = rng.choice(IMAGES)
        request.media.append(Media(mime_type=mime_type, data=data))
    for name in rng.sample(REWARDS, rng.randint(1, 3)):
        request.rewards.add(name=name)
    return request


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 7, 100, 5000]))


def mutated(rng: random.Random) -> bytes:
    """A message with some bytes changed, inserted or cut off."""
    data = bytearray(good(rng).SerializeToString())
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data)


def huge_claim(rng: random.Random) -> bytes:
    """Small messages that say that they hold a lot."""
    request = good(rng)
    medium = request.media[0]
    claim = rng.randrange(5)
    if claim == 0:
        medium.width_px = medium.height_px = 2**31 - 1
    elif claim == 1:
        medium.ClearField("data")
        medium.mime_type = "application/x-tensor"
        medium.tensor.spec.CopyFrom(codec.make_spec(7, [2 ** rng.randint(10, 40), 2**31, 2**31, 3]))
        medium.tensor.inline = b"abc"
    elif claim == 2:  # a PNG whose header claims 2^31 - 1 pixels a side
        medium.mime_type = "image/png"
        png = bytearray(IMAGES[0][1])
        png[16:24] = (2**31 - 1).to_bytes(4, "big") * 2
        medium.data = bytes(png)
    elif claim == 3:
        medium.ClearField("data")
        medium.blob.uri, medium.blob.byte_size = "../../etc/passwd", 2**62
    else:
        return b"\x22\xff\xff\xff\xff\x07" + rng.randbytes(20)  # field 4 with 2 GiB to come
    return request.SerializeToString()


def wrong_shape(rng: random.Random) -> bytes:
    request = good(rng)
    shape = [rng.choice([0, 1, 2, 3, 8, 9000]) for _ in range(rng.randint(0, 6))]
    medium = request.media[0]
    medium.ClearField("data")
    medium.mime_type = "application/x-tensor"
    medium.tensor.spec.CopyFrom(codec.make_spec(rng.choice([7, 1, 99]), shape))
    medium.tensor.inline = rng.randbytes(rng.choice([0, 3, 192, 1000]))
    return request.SerializeToString()


def truncated_image(rng: random.Random) -> bytes:
    request = good(rng)
    for medium in request.media:
        medium.data = medium.data[: rng.randint(0, len(medium.data))]
    return request.SerializeToString()


def odd_words(rng: random.Random) -> bytes:
    """Parameters, metadata and prompts of any kind and depth."""
    request = good(rng)
    value: object = rng.choice([None, float("nan"), -1e308, "x" * 5000, [[[]]] * 50, {"objects": [{"count": -1}]}])
    for _ in range(rng.randint(0, 30)):
        value = {rng.choice(["objects", "color", "mode", "a"]): value}
    struct = Struct()
    struct.update(value if isinstance(value, dict) else {"objects": value})
    rng.choice([request.metadata, request.rewards[0].params]).CopyFrom(struct)
    request.prompt = rng.choice(["", "\u0000", "a" * 20_000, "🟥" * 100, '"' * 99])
    return request.SerializeToString()


KINDS = [random_bytes, mutated, huge_claim, wrong_shape, truncated_image, odd_words]


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


async def fuzz(address: str, pid: int, count: int, seed: int = 0) -> dict:
    """Send `count` requests; figures: statuses by kind, RSS of the server after a quarter and at the end, in bytes."""
    rng, statuses, slots = random.Random(seed), Counter(), asyncio.Semaphore(AT_ONCE)
    started, early = time.monotonic(), 0
    async with aio_channel(address) as channel:
        call = channel.unary_unary(METHOD)  # bytes in, bytes out

        async def one(kind, data):
            async with slots:
                try:
                    await call(data, timeout=CALL_TIMEOUT_S)
                    status = "OK"
                except grpc.aio.AioRpcError as error:
                    status = error.code().name
                statuses[f"{kind} {status}"] += 1

        for start in range(0, count, 200):
            kinds = [rng.choice(KINDS) for _ in range(min(200, count - start))]
            await asyncio.gather(*(one(kind.__name__, kind(rng)) for kind in kinds))
            if not early and start + len(kinds) >= count / 4:
                early = rss_bytes(pid)
        response = await RewardServiceStub(channel).ScoreGroup(good(random.Random(1)), timeout=CALL_TIMEOUT_S)
    late = rss_bytes(pid)
    bad = {key: n for key, n in statuses.items() if not is_fine(*key.split())}
    return {
        "count": count, "seconds": time.monotonic() - started, "statuses": dict(statuses), "bad": bad,
        "scored_afterwards": len(response.samples), "rss_early": early, "rss_late": late,
        "rss_growth": late / early - 1,
    }  # fmt: skip


def is_fine(kind: str, status: str) -> bool:
    return status in FINE or (status == UNREADABLE and kind in ("random_bytes", "mutated", "huge_claim"))


async def run(count: int, seed: int = 0) -> dict:
    """The same with a server of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headwater_reward", "--bind", "127.0.0.1:0", "--rewards", ",".join(REWARDS),
        stderr=asyncio.subprocess.PIPE, limit=2**22,
    )  # fmt: skip
    address = asyncio.get_running_loop().create_future()
    ready = asyncio.Event()

    async def read():
        while line := (await process.stderr.readline()).decode():
            if (match := re.search(r"listens on (\S+)", line)) and not address.done():
                address.set_result(match[1])
            if "checked rewards" in line:
                ready.set()

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(60):
            await ready.wait()
        figures = await fuzz(await address, process.pid, count, seed)
        assert process.returncode is None, "the server has died"
        return figures
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(60):
            await process.wait()
        await reading


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    result = asyncio.run(run(chosen.count, chosen.seed))
    print(json.dumps(result))
    sys.exit(bool(result["bad"]) or result["rss_growth"] > 0.05)
