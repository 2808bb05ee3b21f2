"""The command line: quick help, clear errors, figures; no service is running."""

import json
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.cli import main as cli
from headwater.cli.figures import summarize, trend
from headwater.cli.pictures import Picture, save_grid
from headwater.cli.progress import figures_line

HEADWATER = [sys.executable, "-m", "headwater.cli.main"]


def headwater(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HEADWATER, *arguments], capture_output=True, text=True, timeout=60, check=False, **options)


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.COMMANDS if name != "parity")])
def test_help_takes_less_than_a_second_and_imports_nothing_heavy(command):
    code = (
        "import sys\nfrom headwater.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'grpc', 'numpy', 'pydantic', 'rich', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    began = cpu_seconds_of_children()  # not the time on the clock: other tests may keep the machine busy
    done = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, check=False)
    assert cpu_seconds_of_children() - began < 1.0
    assert done.returncode == 0, done.stderr
    assert "usage: headwater" in done.stdout


def test_parity_hands_all_its_arguments_on():
    done = headwater("parity", "--help")
    assert done.returncode == 0, done.stderr
    assert "parity" in done.stdout.splitlines()[0]
    assert headwater("parity", "--no-such-option").returncode == 2


def test_import_headwater_never_imports_torch():
    modules = (
        "headwater, headwater.client, headwater.cli.quickstart, headwater.cli.pictures, headwater.cli.follow, "
        "headwater.config.load, headwater.config.prompts, headwater.supervisor.stack, headwater.rpc.server, "
        "headwater.sampling, headwater.stream.scored, headwater.tensors.codec, headwater.tensors.blobs"
    )
    code = f"import sys\nimport {modules}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_wrong_recipe_key_is_one_line_with_the_nearest_key_and_exit_code_2(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[model]\npath = 'm'\n[train]\nstep = 3\n")
    done = headwater("train", str(recipe), "--json")
    assert done.returncode == 2
    assert "INVALID_ARGUMENT: unknown recipe key 'train.step'; the nearest valid key is 'train.steps'" in done.stderr
    assert "Traceback" not in done.stderr
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["field"] == "train.step"
    assert error["reason"] == "RECIPE_UNKNOWN_KEY"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--router", "{free}"], "the router at {free} does not answer"),
        (["submit", "a red circle", "--out", "{tmp}", "--router", "{free}"], "no router answers at {free}"),
        (["train", "{recipe}", "model.path=m", "--trainer", "{free}"], "the trainer at {free} does not answer"),
        (["train", "{recipe}", "--router", "{free}"], "the router at {free} does not answer"),
    ],
)
def test_services_that_do_not_answer_are_named_with_the_remedy(tmp_path, arguments, words):
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
    names = {"free": free_address(), "tmp": str(tmp_path), "recipe": str(recipe)}
    began = time.monotonic()
    done = headwater(*(argument.format(**names) for argument in arguments))
    assert time.monotonic() - began < 15
    assert done.returncode == 1
    assert words.format(**names) in done.stderr
    assert "headwater up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "no-such.toml"], "there is no recipe no-such.toml"),
        (["submit", "x", "-n", "0", "--out", "out"], "-n is 0"),
        (["status", "--router", "nonsense"], "'nonsense' is not HOST:PORT"),
        (["up", "--model", "no-such-model"], "not a pipeline folder"),
        (["up", "--model", "{model}", "--rollout-workers", "0"], "--rollout-workers is 0"),
        (["up", "--model", "{model}", "--port-base", "80"], "--port-base 80"),
        (["up", "--model", "{model}", "--redis", "localhost:6379"], "the Redis URL 'localhost:6379' is wrong"),
        (["quickstart", "--model", "{model}", "train.step=3"], "'train.steps'"),
        (["quickstart", "--model", "{model}", "--steps", "0"], "train.steps is 0"),
    ],
)
def test_the_callers_mistakes_exit_with_2(tmp_path, arguments, words):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text("{}")
    done = headwater(*(argument.format(model=model) for argument in arguments), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_redis_is_named_within_seconds(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    redis = f"redis://{free_address()}/0"
    port_base = free_address().rpartition(":")[2]
    began = time.monotonic()
    done = headwater("up", "--model", str(tmp_path), "--redis", redis, "--port-base", port_base, cwd=tmp_path)
    assert time.monotonic() - began < 10
    assert done.returncode == 1
    assert f"Redis at {redis} does not answer" in done.stderr


def test_trend_compares_quarters_and_needs_two_steps_in_each():
    assert trend([0.0] * 7) is None
    rising = trend([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 1.1])
    assert rising is not None
    assert rising.first_mean == pytest.approx(0.05)
    assert rising.last_mean == pytest.approx(1.05)
    assert rising.first_standard_error == pytest.approx(0.05)
    assert rising.z == pytest.approx(1.0 / (0.05 * 2**0.5))
    assert rising.rises
    flat = trend([0.0, 1.0] * 8)
    assert flat is not None
    assert not flat.rises


def test_summary_orders_steps_and_reduces_figures():
    steps = {
        step: {
            "reward/mean": step / 10,
            "log_prob_drift/max": step * 1e-7,
            "rate/pairs_per_s": 2.0,
            "groups/dropped": 1.0,
        }
        for step in (8, 7, 6, 5, 4, 3, 2, 1)
    }
    figures = summarize(steps)
    assert figures["steps"] == 8
    assert figures["reward"]["first_mean"] == pytest.approx(0.15)
    assert figures["reward"]["last_mean"] == pytest.approx(0.75)
    assert figures["log_prob_drift_max"] == pytest.approx(8e-7)
    assert figures["rate_pairs_per_s"] == 2.0
    assert figures["groups_dropped"] == 8.0
    assert summarize({1: {"reward/mean": 0.5}})["reward"] is None


def test_the_figures_of_a_step_fit_a_terminal():
    values = {
        "reward/mean": 0.8927,
        "reward/std": 0.1,
        "images": 48.0,
        "log_prob_drift/max": 1e-7,
        "staleness/mean": 1.0,
    }
    line = figures_line({**values, "rate/images_per_s": 100.0, "rate/pairs_per_s": 900.0})
    assert line == "reward 0.8927 ± 0.0144  drift 1.0e-07  staleness 1.0  100.0 img/s  900.0 pairs/s"
    assert len(line) <= 80  # columns of a plain terminal
    assert figures_line({"reward/mean": 0.5}) == "reward 0.5000"


def test_json_has_no_nan(capsys):
    from headwater.cli.output import print_json

    print_json({"a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": 2}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.0], "c": {"d": 2}}


def test_the_grid_shows_both_sides(tmp_path):
    from PIL import Image

    def row(colour):
        return [Picture(Image.new("RGB", (64, 64), colour), 0.5), Picture(Image.new("RGB", (64, 64), colour), None)]

    save_grid({"a red circle": row("blue")}, {"a red circle": row("red")}, tmp_path / "grid.png", ("before", "after"))
    pixels = Image.open(tmp_path / "grid.png").convert("RGB")
    colours = {colour for _, colour in pixels.getcolors(1 << 20)}
    assert {(0, 0, 255), (255, 0, 0)} <= colours
    middle = pixels.width // 2
    left = pixels.crop((0, 0, middle, pixels.height)).getcolors(1 << 20)
    assert (255, 0, 0) not in {colour for _, colour in left}
