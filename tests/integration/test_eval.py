"""`headwater eval` against a real router, a worker with the diffusers engine, and a reward server."""

import asyncio
import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from headwater_reward import registry
from headwater_reward.config import RewardConfig
from headwater_reward.service import RewardService
from headwater_rollout.config import RolloutConfig
from headwater_rollout.engine import load_engine
from headwater_rollout.worker import Worker
from headwater_router.config import RouterConfig
from headwater_router.service import SERVICE, RouterService
from PIL import Image

from headwater.cli import connect
from headwater.cli.main import main
from headwater.client import Client
from headwater.evaluation import collect
from headwater.reward.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from headwater.router.v1.router_pb2_grpc import add_RouterServiceServicer_to_server
from headwater.rpc.server import Server

ROOT = Path(__file__).parents[2]
PROMPTS = str(ROOT / "recipes" / "prompts" / "tiny_geneval_eval.jsonl")
TEXT_PROMPTS = str(ROOT / "recipes" / "prompts" / "tiny_text_eval.jsonl")


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(tiny_sd3_dir, executor):
    return executor.submit(load_engine, "diffusers", tiny_sd3_dir, "fp32", "cpu").result()


@contextlib.asynccontextmanager
async def router():
    service, server = RouterService(RouterConfig(heartbeat_interval_s=0.2)), Server("127.0.0.1:0", name="router")
    server.add(add_RouterServiceServicer_to_server, service, SERVICE)
    address = await server.start()
    await service.open()
    try:
        yield address
    finally:
        await server.stop(0)
        await service.close()


@contextlib.asynccontextmanager
async def rewards(*names):
    service, server = RewardService(registry.create(names), RewardConfig()), Server("127.0.0.1:0", name="reward")
    server.add(add_RewardServiceServicer_to_server, service, "headwater.reward.v1.RewardService")
    address = await server.start()
    await service.load()
    try:
        yield address
    finally:
        await service.drain()
        await server.stop(0)


@contextlib.asynccontextmanager
async def services(engine, executor):
    """Address of a router with one worker that scores with color_shape and tiny-geneval."""
    async with router() as address, rewards("color_shape", "tiny-geneval") as reward:
        config = RolloutConfig(model="", bind="127.0.0.1:0", worker_id="w0", router=address, rewards=(reward,))
        worker = Worker(config, engine, executor)
        await worker.start()
        try:
            async with asyncio.timeout(20):
                with Client(address) as client:
                    while not (await asyncio.to_thread(client.status)).workers:
                        await asyncio.sleep(0.05)
            yield address
        finally:
            await worker.server.stop(0)
            await worker.close()


class Cli:
    """Runs `headwater eval` in a thread of this process."""

    def __init__(self, router, capsys):
        self.router, self.capsys = router, capsys
        self.out = self.err = ""

    async def __call__(self, *arguments):
        words = ["eval", *map(str, arguments), "--router", self.router, "--json"]
        async with asyncio.timeout(60):
            code = await asyncio.to_thread(main, words)
        self.out, self.err = self.capsys.readouterr()
        return code, json.loads(self.out.splitlines()[-1])


async def test_two_evaluations_of_the_same_weights_are_paired_and_equal(engine, executor, tmp_path, capsys):
    async with services(engine, executor) as address:
        cli = Cli(address, capsys)
        common = ("--prompts", PROMPTS, "--rewards", "tiny-geneval", "--monitors", "color_shape", "--limit", 12,
                  "--steps", 2, "--samples-per-prompt", 2)  # fmt: skip
        code, first = await cli(*common, "--out", tmp_path / "a")
        assert code == 0, cli.err
        assert "prompt 12/12  score" in cli.err
        assert "single_object" in cli.out
        assert "monitor color_shape" in cli.out
        assert first["weight_versions"] == [{"run_id": "", "step": 0, "samples": 24}]
        overall = first["results"]["overall"]
        assert (overall["score"]["samples"], overall["score"]["prompts"], first["failed"]) == (24, 12, 0)
        assert overall["score"]["method"] == "wilson_clustered"
        assert overall["score"]["ci95"][0] <= overall["score"]["mean"] <= overall["score"]["ci95"][1]
        assert set(first["results"]) == {"overall", "single_object", "two_object", "counting", "colors", "position",
                                         "color_attr"}  # fmt: skip
        # color_shape does not judge prompts that name no colour: a failure of the monitor, not a score of 0
        monitor = first["results"]["single_object"]["color_shape"]
        assert (monitor["mean"], monitor["failed"]) == (None, 4)
        assert 0 < overall["color_shape"]["samples"] < 24

        stored = json.loads((tmp_path / "a" / "results.json").read_text())
        assert len(stored["samples"]) == 24
        sample = stored["samples"][1]
        assert (sample["prompt_index"], sample["sample_index"], sample["tag"]) == (0, 1, "single_object")
        assert set(sample["values"]) == {"score", "tiny-geneval", "tiny-geneval.correct"}
        assert "color_shape" in sample["errors"]
        assert Image.open(tmp_path / "a" / "grid.png").height > 6 * 144

        code, second = await cli(*common, "--out", tmp_path / "b", "--baseline", tmp_path / "a")
        assert code == 0, cli.err
        difference = second["comparison"]["difference"]
        assert (difference["overall"]["score"]["samples"], difference["overall"]["score"]["mean"]) == (24, 0.0)
        assert difference["overall"]["color_shape"]["mean"] == 0.0  # real-valued: the pictures are the same ones
        assert set(difference) == set(first["results"])
        assert "paired by prompt and seed" in cli.out


async def test_a_recipe_gives_sampling_and_rewards(engine, executor, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\na blue square\na green triangle\n")
    async with services(engine, executor) as address:
        cli = Cli(address, capsys)
        recipe = ROOT / "recipes" / "quickstart.toml"
        code, found = await cli(recipe, "--prompts", prompts, "--steps", 3, "--seed", 5, "--out", tmp_path / "out")
    assert code == 0, cli.err
    (reward,) = found["settings"]["rewards"]
    assert (reward["name"], reward["params"]["shape_weight"]) == ("color_shape", 0.0)
    assert found["settings"]["sampling"]["steps"] == 3
    assert found["settings"]["sampling"]["height_px"] == 64
    assert set(found["results"]) == {"overall", "all"}
    assert found["results"]["overall"]["score"]["method"] == "t"


async def test_a_prompt_that_cannot_be_judged_is_a_failure_and_the_others_count(engine, executor, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('the word "HI"\na blue square\na circle and a star\n')
    async with services(engine, executor) as address:
        cli = Cli(address, capsys)
        code, found = await cli("--prompts", prompts, "--rewards", "tiny-geneval", "--steps", 1, "--out", tmp_path)
    assert code == 0, cli.err
    assert (found["samples_total"], found["failed"]) == (3, 1)
    assert found["results"]["overall"]["score"]["samples"] == 2
    assert set(found["results"]) == {"overall", "all", "colors", "two_object"}  # tags as the reward names them
    assert "failed, not counted: score of 1 sample(s), e.g. PROMPT_NEEDS_OCR" in cli.out


async def test_mistakes_end_it_at_once_with_the_remedy(engine, executor, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collect, "_WEIGHTS_WAIT_S", 0.0)
    monkeypatch.chdir(tmp_path)
    scored = ("--prompts", PROMPTS, "--rewards", "tiny-geneval", "--steps", 2)
    cases = [
        (("--prompts", PROMPTS, "--rewards", "tiny_geneval"), 2, "no reward server hosts 'tiny_geneval'"),
        (("--prompts", PROMPTS), 2, "pass --rewards"),
        (("--prompts", "none.jsonl", "--rewards", "tiny-geneval"), 2, "there is no file none.jsonl"),
        (("--prompts", TEXT_PROMPTS, "--rewards", "tiny-geneval", "--limit", 2, "--steps", 2), 2, "'ocr'"),
        ((*scored, "--height", 60), 2, "height_px is 60"),
        ((*scored, "--width", -1), 2, "width_px is -1"),
        ((*scored, "--limit", 0), 2, "--limit is 0"),
        ((*scored, "--baseline", "none.json"), 2, "there is no file none.json"),
        ((*scored, "--min-version", "12"), 2, "not RUN:STEP"),
        ((*scored, "--min-version", "other:3"), 1, "run 'other' step 3 or newer (w0: run '' step 0)"),
    ]
    async with services(engine, executor) as address:
        cli = Cli(address, capsys)
        for arguments, expected, words in cases:
            code, found = await cli(*arguments)
            assert (code, words in cli.err) == (expected, True), (arguments, code, cli.err)
            assert "message" in found["error"]
            assert "prompt 24/240" not in cli.err  # not after all prompts have failed in the same way
    assert not (tmp_path / "runs").exists()


async def test_without_router_or_worker_it_says_how_to_start_one(capsys, monkeypatch):
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 1.0)
    arguments = ("--prompts", PROMPTS, "--rewards", "tiny-geneval")
    async with router() as address:
        cli = Cli(address, capsys)
        code, found = await cli(*arguments)
        assert (code, found["error"]["reason"]) == (1, "NO_WORKER")
        assert "headwater up" in cli.err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cli = Cli(f"127.0.0.1:{free.getsockname()[1]}", capsys)
    code, found = await cli(*arguments)
    assert (code, found["error"]["reason"]) == (1, "UNREACHABLE")
    assert "headwater up" in cli.err
