"""Objective nft through all services: SGLang worker, reward server, stream, trainer, weight updates."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from free_ports import free_port_base
from safetensors import safe_open

HEADWATER = [sys.executable, "-m", "headwater.cli.main"]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
RECIPE = """
[sampling]
steps = 4
height_px = 64
width_px = 64
[prompts]
texts = ["a red circle", "a green square"]
[[rewards]]
name = "color_shape"
params = { color_weight = 1.0, shape_weight = 0.0 }
[objective]
name = "nft"
kl_coef = 1e-4
sigmas_per_sample = 2
[train]
steps = 4
groups_per_step = 2
group_size = 4
staleness_bound = 1
checkpoint_every = 2
"""


@pytest.fixture
def base(tmp_path):
    """The port base of a stack that is up."""
    port_base = free_port_base(21400, 30000)
    command = [*HEADWATER, "up", "--run-dir", str(tmp_path / "up"), "--port-base", str(port_base)]
    log = (tmp_path / "up.log").open("wb")
    process = subprocess.Popen([*command, "--rewards", "color_shape"], stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 300
        while "Headwater is up" not in (text := (tmp_path / "up.log").read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
        yield port_base
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log.close()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", ["", "[lora]\nrank = 4\nalpha = 8.0\n"], ids=["full", "lora"])
def test_a_run_samples_from_the_old_policy_that_its_checkpoint_holds(tmp_path, base, lora):
    (tmp_path / "nft.toml").write_text(RECIPE + lora)
    command = [*HEADWATER, "train", str(tmp_path / "nft.toml"), "--run-id", "nft", "--json"]
    services = ["--router", f"127.0.0.1:{base}", "--trainer", f"127.0.0.1:{base + 2}"]
    done = subprocess.run(
        [*command, *services], capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["state"], figures["steps"], figures["weight_version"]) == ("succeeded", 4, 4)
    assert figures["steps_skipped"] == 0
    assert "log_prob_drift_max" not in figures

    folder = Path(figures["output_dir"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["pairs"] for line in lines] == [16.0] * 4
    assert lines[0]["old_distance"] < 1e-9
    assert all(line["old_distance"] > 0 and line["grad_norm"] > 0 for line in lines[1:])
    assert all(line["staleness/max"] <= 1 for line in lines)

    (checkpoint, *_) = sorted((folder / "checkpoints").glob("step_00000004/model/*.safetensors"))
    with safe_open(checkpoint, framework="pt") as tensors:
        names = set(tensors.keys())
    assert {name.removeprefix("old.") for name in names if name.startswith("old.")} == {
        name for name in names if not name.startswith("old.")
    }
    log = (tmp_path / "up" / "logs" / "rollout-0.log").read_text()
    assert len(set(re.findall(r"run=nft version=(\d+)", log))) > 2  # groups of several weight versions
