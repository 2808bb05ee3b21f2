"""`headwater reward` against a real server on a port of its own."""

import asyncio
import json
import threading

import pytest
from headwater_reward.config import RewardConfig
from headwater_reward.registry import Score
from headwater_reward.rewards.color_shape import ColorShapeReward, draw
from headwater_reward.service import RewardService
from PIL import Image

from headwater.cli import main as cli
from headwater.reward.v1 import reward_pb2_grpc as rpc
from headwater.rpc.server import Server


class ForgetfulReward(ColorShapeReward):
    name = "forgetful"

    def score(self, batch):
        return [Score(0.0)] * len(batch)


@pytest.fixture(scope="module")
def address():
    """A server with one reward that works and one that does not, on a loop in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start():
        service = RewardService([ColorShapeReward(), ForgetfulReward()], RewardConfig())
        server = Server("127.0.0.1:0", name="reward")
        server.add(rpc.add_RewardServiceServicer_to_server, service, "headwater.reward.v1.RewardService")
        where = await server.start()
        await service.load()
        await server.set_serving(True)
        return where, server

    where, server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    yield where
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)


@pytest.fixture
def run(address, capsys):
    def call(*words):
        status = cli.main(["reward", words[0], *words[1:], "--reward", address])
        return status, capsys.readouterr()

    return call


@pytest.fixture
def picture(tmp_path):
    Image.fromarray(draw("red", "circle")).save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


def last_json(out):
    return json.loads(out.out.splitlines()[-1])


def test_list_names_ranges_and_parameters(run):
    status, out = run("list")
    assert status == 0
    assert "color_shape             0.0 to 1.0" in out.out
    assert '"color_weight": 0.5' in out.out
    _, out = run("list", "--json")
    assert [info["name"] for info in last_json(out)["rewards"]] == ["color_shape", "forgetful"]


def test_check_fails_when_one_reward_does(run):
    status, out = run("check", "--json")
    figures = last_json(out)
    assert (status, figures["passed"]) == (1, False)
    assert [check["passed"] for check in figures["checks"]] == [True, False]
    assert run("check", "color_shape")[0] == 0


def test_score_prints_a_score_per_image_and_reward(run, picture):
    status, out = run("score", picture, picture, "--prompt", "a red circle", "--json")
    assert status == 0
    first, second = last_json(out)["samples"]
    assert first == second
    assert [score["value"] for score in first["scores"]] == [pytest.approx(1.0, abs=0.05), 0.0]
    status, out = run("score", picture, "--prompt", "hello", "--rewards", "color_shape")
    assert (status, "error: " in out.out) == (1, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rewards", "colour_shape"), "did you mean 'color_shape'"),
        (("--params", "{"), "--params '{' is no JSON"),
        (("--params", '{"colour": "red"}'), "did you mean 'color'"),
    ],
)
def test_mistakes_are_told(run, picture, words, told):
    status, out = run("score", picture, "--prompt", "a red circle", *words)
    assert status == 2
    assert told in out.err
    assert run("score", "no.png", "--prompt", "x")[0] == 2
    assert run("score", "picture.bmp", "--prompt", "x")[0] == 2
