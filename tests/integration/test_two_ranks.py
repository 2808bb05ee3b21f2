import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from recorded import make_groups, save_groups

from headwater.config.load import parse_recipe
from headwater.tensors.blobs import BlobStore

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow
RECIPE = """
[model]
path = "{model}"
[sampling]
steps = 6
height_px = 64
width_px = 64
{sampling}
guidance_scale = {guidance}
[prompts]
texts = ["a red circle"]
[[rewards]]
name = "first"
[[rewards]]
name = "second"
weight = 0.5
[objective]
kl_coef = {kl}
{objective}
[train]
steps = 4
groups_per_step = 3
group_size = 3
micro_batch_size = {micro}
updates_per_batch = {updates}
gradient_checkpointing = {checkpointing}
[optimizer]
lr = 1e-3
"""
LORA = "[lora]\nrank = 4\nalpha = 8.0\n"
PLAIN = {
    "guidance": 1.0, "kl": 0.0, "micro": 3, "updates": 1, "checkpointing": "false", "sampling": "window_size = 2",
    "objective": "clip_range = 0.001",
}  # fmt: skip
NFT = {"sampling": "", "objective": 'name = "nft"\nsigmas_per_sample = 2'}

AWM = {"sampling": "", "objective": 'name = "awm"\nclip_range = 0.01\nsigmas_per_sample = 2\nkl_reference = "ema"'}
DPO = {"sampling": "", "objective": 'name = "dpo"\nsigmas_per_sample = 1\ndpo_beta = 10.0'}

CASES = {
    "lora": (LORA, {}),
    "full": ("", {}),
    "everything": (  # guidance, KL, micro-batches that do not fit, more updates, recomputed old log-probs
        LORA, {"guidance": 3.0, "kl": 0.1, "micro": 4, "updates": 3, "checkpointing": "true",
               "objective": "clip_range = 0.001\nrecompute_old_log_prob = true"},
    ),
    "full with KL": ("", {"kl": 0.1, "updates": 3, "micro": 5}),
    "nft lora": (LORA, {**NFT, "kl": 0.1, "guidance": 3.0}),
    "nft full": ("", {**NFT, "kl": 0.1, "updates": 3, "micro": 4, "checkpointing": "true"}),
    "awm full": ("[ema]\n", {**AWM, "kl": 0.1, "updates": 3, "micro": 4}),
    "dpo lora": (LORA, {**DPO, "updates": 3}),  # one pair and two ranks: one of them only keeps step
}  # fmt: skip
RESUMED = {
    "lora": (1, 1),
    "full": (2, 2),
    "everything": (2, 1),
    "nft lora": (1, 1),
    "nft full": (2, 2),
}  # ranks before and after
_FIGURES = {"nft": "old_distance", "dpo": "preference/chosen_error"}
FIGURE = {case: _FIGURES.get(case[:3], "ratio/abs_deviation") for case in CASES}


@dataclass
class Outcome:
    lines: list[dict]
    weights: dict
    folder: Path


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Every case on 1 and on 2 ranks, and stopped after two steps and resumed, in as few processes as possible."""
    from headwater.diffusion import tiny_sd3

    root = tmp_path_factory.mktemp("recorded")
    model = tiny_sd3.build(root / "tiny-stable-diffusion-3-medium")
    jobs = {1: [], 2: []}
    for case, (text, options) in CASES.items():
        made = prepare(root / case / "1", model, text, **options)
        for name in ("2", *(["resumed"] if case in RESUMED else [])):
            shutil.copytree(made, made.parent / name)
        for ranks in (1, 2):
            jobs[ranks].append(str(made.parent / str(ranks)))
    for case, (before, _) in RESUMED.items():
        jobs[before].append(f"{root / case / 'resumed'}:2")
    launch(1, jobs[1])
    launch(2, jobs[2])
    for ranks in (1, 2):
        launch(ranks, [str(root / case / "resumed") for case, (_, after) in RESUMED.items() if after == ranks])
    return {(path.parent.parent.name, path.parent.name): read(path.parent) for path in root.glob("*/*/losses.jsonl")}


def prepare(folder, model, text, **options):
    folder.mkdir(parents=True)
    toml = RECIPE.format(model=model, **{**PLAIN, **options}) + text
    (folder / "recipe.toml").write_text(toml)
    recipe = parse_recipe(toml)
    save_groups(folder / "groups.bin", make_groups(recipe, BlobStore(str(folder / "blobs")), "run", 12))
    return folder


def launch(ranks, jobs):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1",
        "--master-port", str(port), str(HERE / "train_recorded.py"), *jobs,
    ]  # fmt: skip
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def read(folder):
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return Outcome(lines, json.loads((folder / "weights.json").read_text()), folder)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_losses_of_one(case, outcomes):
    one, two = outcomes[case, "1"], outcomes[case, "2"]
    assert len(one.lines) == len(two.lines) == 4
    for a, b in zip(one.lines, two.lines, strict=True):
        for name in ("loss", "grad_norm", FIGURE[case], "reward/mean", "staleness/mean"):
            assert a[name] == pytest.approx(b[name], abs=1e-5), name
        assert a["pairs"] == b["pairs"] == (3 if case == "dpo lora" else 18)
        assert a["grad_norm"] > 0
    assert one.weights["names"] == two.weights["names"]
    assert one.weights["sum"] == pytest.approx(two.weights["sum"], rel=1e-6)


@pytest.mark.parametrize("case", ["lora", "full", "everything"])
def test_the_first_ratio_is_exactly_one(case, outcomes):
    """At the engine's batch shape without help, at another shape with recomputed old log-probs."""
    first = outcomes[case, "1"].lines[0]
    if case != "everything":  # whose later updates of the step have moved on
        assert first["ratio/mean"] == 1.0
        assert first["ratio/abs_deviation"] == 0.0
        assert first["log_prob_drift/max"] == 0.0
    assert first["log_prob_drift/max"] < 1e-5


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_continues_where_it_stopped(case, outcomes):
    before, after = RESUMED[case]
    whole, resumed = outcomes[case, str(before)], outcomes[case, "resumed"]
    assert [line["step"] for line in resumed.lines] == [1, 2, 3, 4]
    for a, b in zip(whole.lines, resumed.lines, strict=True):
        for name in ("loss", "grad_norm", FIGURE[case]):
            assert (a[name] == b[name]) if before == after else a[name] == pytest.approx(b[name], abs=1e-5), name
    if before == after:
        assert whole.weights == resumed.weights
    else:
        assert whole.weights["sum"] == pytest.approx(resumed.weights["sum"], rel=1e-6)


@pytest.mark.parametrize("case", ["nft lora", "nft full"])
def test_the_old_policy_begins_as_the_trained_one_and_then_lags(case, outcomes):
    lines = outcomes[case, "1"].lines
    if case == "nft lora":  # the other's later updates of the step have moved on
        assert lines[0]["old_distance"] < 1e-10
    assert all(line["old_distance"] > 0 for line in lines[1:])
    assert all(0.3 < line["optimality/mean"] < 0.7 for line in lines)  # advantages have a mean of 0
    assert "log_prob_drift/max" not in lines[0]


def test_checkpoints_hold_no_pickle(outcomes):
    (checkpoint,) = (outcomes["lora", "resumed"].folder / "checkpoints").iterdir()
    suffixes = {path.suffix for path in checkpoint.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json", ".toml"}
