"""`headwater reward` against a real reward server of its own."""

import json
import re
import subprocess
import sys

import pytest
from headwater_reward.rewards.color_shape import draw
from PIL import Image

from headwater.cli import main as cli


@pytest.fixture(scope="module")
def server():
    """Address of a server of two rewards."""
    command = [sys.executable, "-m", "headwater_reward", "--bind", "127.0.0.1:0"]
    rewards = ["--rewards", "color_shape,jpeg_compressibility"]
    with subprocess.Popen([*command, *rewards], stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if found := re.search(r"127\.0\.0\.1:\d+", line):
                    yield found[0]
                    break
            else:
                pytest.fail("the server ended without an address")
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def image(tmp_path):
    Image.fromarray(draw("red", "circle")).save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


def headwater(capsys, *words):
    status = cli.main(["reward", *words])
    return status, capsys.readouterr()


def figures(captured):
    return json.loads(captured.out.splitlines()[-1])


def test_list_names_ranges_and_parameters(capsys, server):
    status, captured = headwater(capsys, "list", "--reward", server, "--json")
    rewards = figures(captured)["rewards"]
    assert (status, [reward["name"] for reward in rewards]) == (0, ["color_shape", "jpeg_compressibility"])
    assert rewards[0]["default_params"]["color_weight"] == 0.5
    assert "unbounded" in headwater(capsys, "list", "--reward", server)[1].out


def test_check_scores_the_golden_images(capsys, server):
    status, captured = headwater(capsys, "check", "--reward", server, "--json")
    assert (status, [check["passed"] for check in figures(captured)["checks"]]) == (0, [True, True])
    assert headwater(capsys, "check", "color_shape", "--reward", server)[1].out.count("passed") == 1
    status, captured = headwater(capsys, "check", "colour", "--reward", server)
    assert (status, "names[0]" in captured.err) == (2, True)


def test_score_gives_a_score_or_an_error_and_says_so_in_the_status(capsys, server, image):
    words = ("score", image, "--reward", server, "--json", "--prompt")
    status, captured = headwater(capsys, *words, "a red circle")
    scores = {score["name"]: score["value"] for score in figures(captured)["scores"]}
    assert status == 0
    assert scores["color_shape"] > 0.95
    assert scores["jpeg_compressibility"] < 0
    assert headwater(capsys, *words, "it", "--metadata", '{"color": "red", "shape": "circle"}')[0] == 0
    status, captured = headwater(capsys, *words, "a dream")
    assert status == 1
    assert "value" not in figures(captured)["scores"][0]
    assert headwater(capsys, *words, "a dream", "--rewards", "jpeg_compressibility")[0] == 0


def test_mistakes_of_the_caller_name_the_argument(capsys, server, image, tmp_path):
    for words, field in (
        ((str(tmp_path / "none.png"),), "none.png"),
        ((str(tmp_path / "a.bmp"),), ".webp"),
        ((image, "--metadata", "[1"), "--metadata"),
        ((image, "--metadata", "3"), "--metadata"),
        ((image, "--rewards", "colour"), "colour"),
    ):
        status, captured = headwater(capsys, "score", *words, "--prompt", "x", "--reward", server)
        assert (status, field in captured.err) == (2, True), captured.err
