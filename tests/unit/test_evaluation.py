"""Evaluation without services: intervals against known values, seeds, tables, comparison, the grid."""

import json
import random
from pathlib import Path

import pytest
from PIL import Image

from headwater.common.v1.reward_pb2 import RewardRole, RewardSpec
from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.config.prompts import PromptItem
from headwater.errors import InvalidArgument, NotFound
from headwater.evaluation import results
from headwater.evaluation.collect import Collected, Picture, Record
from headwater.evaluation.grid import save_grid
from headwater.evaluation.intervals import bonett_price, mean_interval, paired_interval, t_quantile, wilson
from headwater.evaluation.plan import Plan
from headwater.evaluation.report import report

SAMPLING = SamplingParams(steps=4, height_px=64, width_px=64)


def plan(**fields):
    items = tuple(PromptItem(f"p{i}", {"tag": "ab"[i % 2]}) for i in range(6))
    values = {"items": items, "sampling": SAMPLING, "rewards": (RewardSpec(name="r"),)} | fields
    return Plan(prompts_path=Path("p.jsonl"), **values)


def record(prompt, value, tag="a", seed=0, **fields):
    values = {} if value is None else {"score": value, "r": value}
    errors = {"score": "GONE: the worker died"} if value is None else {}
    return Record(prompt, 0, f"p{prompt}", tag, seed, values, errors, weight_run_id="run", weight_step=1, **fields)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(right, count, low, high):
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    assert wilson(right / count, count) == pytest.approx((low, high), abs=5e-5)
    found = mean_interval([[1.0]] * right + [[0.0]] * (count - right))
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert (found.method, found.prompts, found.samples) == ("wilson", count, count)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (10, 2.2281), (11, 2.2010), (30, 2.0423), (1000, 1.9623)],
)
def test_quantiles_of_students_t(freedom, value):
    assert t_quantile(freedom) == pytest.approx(value, abs=5e-5)


def test_other_scores_get_students_interval_over_prompts():
    found = mean_interval([[0.1, 0.3], [0.5, 0.7], [0.9]])  # means 0.2, 0.6, 0.9
    half = 4.302653 * 0.351188 / 3**0.5
    assert (found.mean, found.low, found.high) == pytest.approx((0.566667, 0.566667 - half, 0.566667 + half), abs=1e-5)
    assert (found.method, found.prompts, found.samples) == ("t", 3, 5)
    alone = mean_interval([[0.1, 0.3]])
    assert (alone.low, alone.high) == (None, None)


def test_samples_of_one_prompt_are_not_counted_as_independent():
    """Sixteen copies of each prompt's score tell what one does; independent ones tell sixteen times as much."""
    once = mean_interval([[float(i % 2)] for i in range(40)])
    copies = mean_interval([[float(i % 2)] * 16 for i in range(40)])
    assert copies.high - copies.low == pytest.approx(once.high - once.low, rel=0.03)
    rng = random.Random(0)
    independent = mean_interval([[float(rng.random() < 0.5) for _ in range(16)] for _ in range(40)])
    assert independent.high - independent.low < 0.35 * (once.high - once.low)
    assert copies.method == independent.method == "wilson_clustered"


def test_all_right_still_leaves_doubt():
    for samples in (1, 8):
        found = mean_interval([[1.0] * samples] * 20)
        assert (found.low, found.high) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    with pytest.raises(ValueError, match="no scores"):
        mean_interval([[1.0], []])


def test_the_clustered_interval_covers_the_truth():
    rng = random.Random(1)
    hits = 0
    for _ in range(300):
        rates = [rng.betavariate(0.7, 0.7) for _ in range(60)]  # mean 0.5, correlated within a prompt
        found = mean_interval([[float(rng.random() < rate) for _ in range(4)] for rate in rates])
        hits += found.low <= 0.5 <= found.high
    assert 0.91 <= hits / 300 <= 0.98


def test_paired_differences():
    # 100 prompts: 20 only now, 8 only before, 72 alike. Bonett-Price: (21 - 9)/102 +- z sqrt((30/102 - (12/102)^2)/102)
    pairs = [[(0, 1)]] * 20 + [[(1, 0)]] * 8 + [[(1, 1)]] * 50 + [[(0, 0)]] * 22
    found = paired_interval(pairs)
    assert (found.mean, found.low, found.high) == pytest.approx((0.12, 0.01492, 0.22038), abs=1e-4)
    assert found.method == "bonett_price"
    same = paired_interval([[(1, 1)]] * 10)
    assert same.low < 0 < same.high
    assert same.mean == 0
    other = paired_interval([[(0.1, 0.3)], [(0.2, 0.3)], [(0.0, 0.3)]])
    half = 4.302653 * 0.1 / 3**0.5
    assert (other.mean, other.low, other.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-5)
    several = paired_interval([[(0, 1), (0, 1)], [(0, 0), (1, 1)], [(0, 1), (1, 1)]])
    assert (several.method, several.prompts, several.samples) == ("t", 3, 6)
    assert bonett_price([1.0] * 3)[1] <= 1.0


def test_seeds_depend_on_seed_and_prompt_alone():
    one, four, other = plan(), plan(samples_per_prompt=4), plan(seed=1)
    assert one.seeds(3) == four.seeds(3)[:1]
    assert len({seed for index in range(6) for seed in four.seeds(index)}) == 24
    assert one.seeds(3) != other.seeds(3)
    first, *_ = one.messages()
    assert list(first.seeds) == one.seeds(0)
    assert not first.sampling.HasField("transition")  # ODE
    assert first.metadata["tag"] == "a"


def test_pictures_are_asked_for_the_first_prompts_of_each_tag():
    asked = [prompt.return_media for prompt in plan(pictures_per_tag=1).messages()]
    assert asked == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samples_per_prompt": 0}, "--samples-per-prompt is 0"),
        ({"rewards": ()}, "pass --rewards"),
        ({"rewards": (RewardSpec(name="r", role=RewardRole.REWARD_ROLE_MONITOR),)}, "pass --rewards"),
        ({"rewards": (RewardSpec(name="r"), RewardSpec(name="r"))}, "may be named once"),
        ({"sampling": SamplingParams(steps=0, height_px=64, width_px=64)}, "sampling.steps is 0"),
    ],
)
def test_a_plan_that_cannot_be_says_why(fields, words):
    with pytest.raises(InvalidArgument, match=words):
        plan(**fields)


def test_failures_are_counted_and_never_scored():
    records = [record(0, 1.0), record(1, 0.0, tag="b"), record(2, None), record(3, None, tag="c")]
    found = results.figures(plan(), Collected(records))
    assert (found["failed"], found["samples_total"]) == (2, 4)
    assert found["results"]["overall"]["score"]["mean"] == 0.5
    assert found["results"]["a"]["score"] | {"ci95": None} == {
        "mean": 1.0, "ci95": None, "prompts": 1, "samples": 1, "method": "wilson", "failed": 1,
    }  # fmt: skip
    assert found["results"]["c"]["score"]["mean"] is None
    assert found["failures"] == [
        {"measure": "score", "reason": "GONE", "samples": 2, "example": "GONE: the worker died"}
    ]
    text = report(found)
    assert "failed, not counted: score of 2 sample(s), e.g. GONE: the worker died" in text
    assert "no score" in text


def test_a_comparison_pairs_by_prompt_and_seed(tmp_path):
    before = [record(i, float(i < 2), tag="ab"[i % 2]) for i in range(6)]
    path = tmp_path / "results.json"
    results.save(path, results.figures(plan(), Collected(before)), before)
    after = [record(i, 1.0, tag="ab"[i % 2]) for i in range(5)] + [record(5, 1.0, seed=9), record(0, None, seed=7)]
    baseline = results.load_baseline(tmp_path, plan())  # the folder will do
    found = results.compare(after, baseline)
    assert found["difference"]["overall"]["score"]["mean"] == pytest.approx(3 / 5)
    assert found["difference"]["a"]["score"]["samples"] == 3
    assert (found["unpaired"], found["unpaired_of_baseline"]) == (2, 1)
    assert results.other_settings(baseline, plan()) == []
    faster = plan(sampling=SamplingParams(steps=2, height_px=64, width_px=64))
    assert results.other_settings(baseline, faster) == ["steps is 2, in the baseline 4"]
    with pytest.raises(InvalidArgument, match="no sample of the baseline"):
        results.compare([record(0, 1.0, seed=5)], baseline)


def test_a_baseline_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(NotFound, match="there is no file"):
        results.load_baseline(tmp_path / "none.json", plan())
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"samples": []}))
    with pytest.raises(InvalidArgument, match=r"not the results\.json"):
        results.load_baseline(path, plan())
    results.save(path, results.figures(plan(), Collected([record(0, 1.0)])), [record(0, 1.0)])
    with pytest.raises(InvalidArgument, match="use the same rewards"):
        results.load_baseline(path, plan(rewards=(RewardSpec(name="other"),)))


def test_the_grid_has_a_row_per_tag(tmp_path):
    def picture(index, tag, colour):
        return Picture(index, "a very long prompt " * 9, tag, Image.new("RGB", (64, 32), colour), None)

    pictures = [picture(0, "a", "red"), picture(1, "b", "blue"), picture(2, "a", "lime"), picture(3, "a", "yellow")]
    assert save_grid(pictures, tmp_path / "grid.png", "title", per_tag=2)
    colours = {colour for _, colour in Image.open(tmp_path / "grid.png").getcolors(1 << 20)}
    assert {(255, 0, 0), (0, 0, 255), (0, 255, 0)} <= colours
    assert (255, 255, 0) not in colours
    assert not save_grid([], tmp_path / "none.png", "title", per_tag=2)
    assert not (tmp_path / "none.png").exists()
