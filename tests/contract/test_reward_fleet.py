"""Servers behind one name: three that are restarted one after the other while groups are scored, and none fails."""

import asyncio
import contextlib
import re
import signal
import socket
import sys

from google.protobuf.struct_pb2 import Struct
from headwater_reward.rewards.color_shape import draw
from headwater_rollout.reward_client import RewardClient
from headwater_rollout.status import WorkerStatus
from test_reward_service import png

from headwater.common.v1.reward_pb2 import RewardSpec


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


async def start(port):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headwater_reward", "--bind", f"127.0.0.1:{port}", "--rewards", "color_shape",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        while line := (await process.stderr.readline()).decode():
            if re.search("checked rewards=color_shape", line):
                return process
    raise AssertionError("the server has not started")


async def stop(process):
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        await process.stderr.read()
        assert await process.wait() == 0


async def test_a_rolling_restart_of_three_servers_fails_no_group():
    ports = [free_port() for _ in range(3)]
    servers = list(await asyncio.gather(*map(start, ports)))
    client = RewardClient([f"127.0.0.1:{port}" for port in ports], WorkerStatus(None))  # conditions need no weights
    specs, image = [RewardSpec(name="color_shape")], png(draw("red", "circle"))
    loop = asyncio.get_running_loop()
    await client.check(specs, loop.time() + 20)
    over, scored = asyncio.Event(), 0

    async def load(number):
        nonlocal scored
        while not over.is_set():
            (scores,) = await client.score(
                group_id=f"g{number}", prompt="a red circle", metadata=Struct(), media=[image] * 2, specs=specs,
                deadline=loop.time() + 30,
            )  # fmt: skip
            assert all(score.value > 0.95 for score in scores)
            scored += 1
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(client.watch())
    loads = [asyncio.create_task(load(number)) for number in range(6)]
    try:
        for i, port in enumerate(ports):
            await stop(servers[i])
            servers[i] = await start(port)
            before = scored
            await asyncio.sleep(0.5)
            assert scored > before
        over.set()
        await asyncio.gather(*loads)  # raises what any group raised
        assert scored > 50
    finally:
        for task in (watching, *loads):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await client.close()
        await asyncio.gather(*(stop(server) for server in servers if server.returncode is None))
