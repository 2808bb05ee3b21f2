"""The parts of a rollout worker that need no service: filters, totals, scores, media, command line."""

import io
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from headwater_rollout import filters, media
from headwater_rollout.config import parse_args
from headwater_rollout.engine.base import GroupResult
from headwater_rollout.publisher import check_finite
from headwater_rollout.reward_policy import parts_of, read_scores, set_total
from PIL import Image

from headwater.common.v1.reward_pb2 import ItemError, RewardRole, RewardScore, RewardSpec
from headwater.common.v1.sample_pb2 import FilterVerdict, Media, Sample
from headwater.errors import HeadwaterError, Internal, InvalidArgument, from_item_error
from headwater.reward.v1.reward_pb2 import SampleScores, ScoreGroupResponse

MONITOR = RewardRole.REWARD_ROLE_MONITOR


@pytest.mark.parametrize(
    ("totals", "dropped"),
    [([0.5, 0.5], True), ([0.5], True), ([0.0, 0.0, 0.0], True), ([0.5, 0.5001], False), ([1e6, 1e6 + 1], False)],
)
def test_zero_variance(totals, dropped):
    decision = filters.decide(["zero_variance"], [Sample(total_reward=total) for total in totals])
    assert (decision.verdict == FilterVerdict.FILTER_VERDICT_DROPPED) == dropped
    assert decision.filter == ("zero_variance" if dropped else "")


def test_total_is_the_weighted_sum_of_trained_rewards():
    specs = [RewardSpec(name="a", weight=2), RewardSpec(name="b"), RewardSpec(name="m", role=MONITOR)]
    sample = Sample(rewards=[RewardScore(name=n, value=v) for n, v in (("a", 0.5), ("b", -0.25), ("m", 9))])
    set_total(sample, specs)
    assert sample.total_reward == 0.75


def test_total_is_unset_without_all_trained_rewards():
    missing = Sample(rewards=[RewardScore(name="a", value=1), RewardScore(name="b", error=ItemError(code=13))])
    set_total(missing, [RewardSpec(name="a"), RewardSpec(name="b")])
    assert not missing.HasField("total_reward")
    watched = Sample(rewards=[RewardScore(name="m", value=1)])
    set_total(watched, [RewardSpec(name="m", role=MONITOR)])
    assert not watched.HasField("total_reward")


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (RewardScore(name="a", value=float("nan")), "finite"),
        (RewardScore(name="a", value=float("inf")), "finite"),
        (RewardScore(name="a"), "neither"),
        (RewardScore(name="b", value=1.0), "neither"),
        (RewardScore(name="a", error=ItemError(code=3, message="no picture")), "no picture"),
    ],
)
def test_what_is_no_score_is_an_error(score, message):
    response = ScoreGroupResponse(samples=[SampleScores(scores=[score])])
    with pytest.raises(HeadwaterError, match=message):
        read_scores(response, RewardSpec(name="a"), 1)
    (kept,) = read_scores(response, RewardSpec(name="a", role=MONITOR), 1)
    assert message in from_item_error(kept.error).message


def test_a_short_answer_of_a_reward_server_is_an_error():
    with pytest.raises(Internal, match="other samples"):
        read_scores(ScoreGroupResponse(), RewardSpec(name="a", role=MONITOR), 1)


def test_media_are_cut_to_fit_a_message():
    items = [Media(data=bytes(3 * 1024 * 1024)) for _ in range(5)]
    parts = parts_of(items)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [item for part in parts for item in part] == items


def test_png_is_lossless_and_large_images_become_jpeg():
    pixels = np.random.default_rng(0).integers(0, 256, (1, 64, 48, 3), dtype=np.uint8)
    png = media.encode(pixels)
    assert (png.mime_type, png.width_px, png.height_px) == ("image/png", 48, 64)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png.data))), pixels[0])
    noise = np.random.default_rng(0).integers(0, 256, (1, 1536, 1536, 3), dtype=np.uint8)
    assert media.encode(noise).mime_type == "image/jpeg"
    with pytest.raises(InvalidArgument, match="still images only"):
        media.encode(np.zeros((2, 8, 8, 3), np.uint8))


@pytest.mark.parametrize("name", ["latents", "log_probs"])
def test_numbers_that_are_not_finite_are_not_published(name):
    result = GroupResult(
        media=np.zeros((1, 1, 8, 8, 3), np.uint8), latents=torch.zeros(1, 2, 4), latent_positions=(0, 1),
        timesteps=torch.zeros(2), sigmas=torch.zeros(2), trained_steps=(0,), log_probs=torch.zeros(1, 1),
    )  # fmt: skip
    check_finite(result)
    getattr(result, name).view(-1)[-1] = torch.nan
    with pytest.raises(Internal, match=name):
        check_finite(result)


def test_command_line(monkeypatch):
    monkeypatch.setenv("HEADWATER_ROUTER", "127.0.0.1:7400")
    config = parse_args(["--model", "m", "--reward", "a:1, b:2", "--redis", "redis://h:1"])
    assert config.rewards == ("a:1", "b:2")
    assert config.router == "127.0.0.1:7400"
    assert config.name.endswith("-7410")
    assert not config.can_publish
    assert parse_args(["--model", "m", "--redis", "redis://h:1", "--blob-root", "b"]).can_publish


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom headwater_rollout.__main__ import main\ntry: main(['--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'grpc', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr.strip() == "[]"
    assert time.monotonic() - started < 5
