"""What the router refuses at the door, with the field at fault."""

import subprocess
import sys

import pytest
from headwater_router.config import RouterConfig, parse_args
from headwater_router.validation import check_prompt, to_group_request

from headwater.common.v1.reward_pb2 import RewardSpec
from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.errors import InvalidArgument, duration
from headwater.rollout.v1.rollout_pb2 import GetWorkerInfoResponse, PublishMode
from headwater.router.v1.router_pb2 import Prompt


def prompt(**fields):
    sampling = fields.pop("sampling", {})
    params = SamplingParams(**({"steps": 10, "height_px": 64, "width_px": 64} | sampling))
    return Prompt(**({"text": "a red circle", "sample_count": 2} | fields), sampling=params)


def window(size, **fields):
    params = SamplingParams(steps=10, height_px=64, width_px=64)
    params.transition.window.size = size
    for name, value in fields.items():
        setattr(params.transition.window, name, value)
    return Prompt(text="a red circle", sample_count=1, sampling=params)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (prompt(text=""), "prompt.text"),
        (prompt(text=" \n"), "prompt.text"),
        (prompt(sample_count=0), "prompt.sample_count"),
        (prompt(sample_count=17), "prompt.sample_count"),
        (prompt(seeds=range(17)), "prompt.seeds"),
        (prompt(request_id="../etc"), "prompt.request_id"),
        (prompt(group_id="a/b"), "prompt.group_id"),
        (prompt(run_id="a b"), "prompt.run_id"),
        (prompt(publish=PublishMode.PUBLISH_MODE_STREAM), "prompt.run_id"),
        (prompt(publish=9), "prompt.publish"),
        (prompt(timeout=duration(0)), "prompt.timeout"),
        (prompt(timeout=duration(1e9)), "prompt.timeout"),
        (prompt(rewards=[RewardSpec(name="")]), "prompt.rewards[0].name"),
        (prompt(rewards=[RewardSpec(name="ocr"), RewardSpec(name="ocr")]), "prompt.rewards[1].name"),
        (prompt(rewards=[RewardSpec(name="ocr", weight=float("nan"))]), "prompt.rewards[0].weight"),
        (prompt(sampling={"steps": 0}), "prompt.sampling.steps"),
        (prompt(sampling={"height_px": 65}), "prompt.sampling.height_px"),
        (window(3, range_begin=8), "prompt.sampling.transition.window"),
        (window(2, range_end=11), "prompt.sampling.transition.window"),
    ],
)
def test_a_bad_prompt_names_its_field(request_, field):
    with pytest.raises(InvalidArgument) as caught:
        check_prompt(request_, [GetWorkerInfoResponse(max_group_size=16, size_multiple_px=16)])
    assert caught.value.field == field
    assert field in caught.value.message


def test_what_one_of_several_workers_can_make_is_accepted():
    infos = [GetWorkerInfoResponse(max_group_size=4, size_multiple_px=16), GetWorkerInfoResponse(size_multiple_px=8)]
    check_prompt(prompt(sample_count=8, sampling={"height_px": 72}), infos)


def test_without_workers_only_the_prompt_itself_is_checked():
    check_prompt(prompt(sampling={"height_px": 65}), [])


def test_the_router_draws_distinct_seeds_of_63_bits():
    seeds = to_group_request(prompt(sample_count=64)).seeds
    assert len(set(seeds)) == 64
    assert max(seeds) < 2**63
    assert max(seeds) > 2**40, "64 draws below 2^40 would not be random"
    assert list(to_group_request(prompt(seeds=[5, 7])).seeds) == [5, 7]


def test_everything_the_client_said_reaches_the_worker():
    given = prompt(
        run_id="run", group_id="g", filters=["zero_variance"], rewards=[RewardSpec(name="ocr", weight=2)],
        publish=PublishMode.PUBLISH_MODE_STREAM, return_media=True,
    )  # fmt: skip
    given.metadata.update({"shape": "circle"})
    given.min_weight_version.step = 3
    sent = to_group_request(given)
    assert sent.prompt == given.text
    for name in ("run_id", "group_id", "publish", "return_media", "sampling", "metadata", "min_weight_version"):
        assert getattr(sent, name) == getattr(given, name)
    assert (list(sent.filters), list(sent.rewards)) == (list(given.filters), list(given.rewards))


def test_command_line_defaults_and_mistakes(capsys):
    assert parse_args([]) == RouterConfig()
    assert parse_args(["--queue-capacity", "7", "--expiry-s", "9"]).queue_capacity == 7
    for argv in (["--queue-capacity", "0"], ["--expiry-s", "0.5"], ["--default-timeout-s", "nan"]):
        with pytest.raises(SystemExit) as caught:
            parse_args(argv)
        assert caught.value.code == 2
        assert argv[0] in capsys.readouterr().err


def test_neither_the_router_nor_the_client_imports_torch():
    code = "import sys, headwater.client, headwater_router.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
