"""Engine against trainer on the same latents."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from headwater_rollout import parity

from headwater.diffusion.families.sd3 import SD3

pytestmark = pytest.mark.engine


def test_fp32_is_bit_identical_on_a_cpu(tiny_sd3_dir: Path):
    command = [
        sys.executable,
        "-m",
        "headwater_rollout.parity",
        str(tiny_sd3_dir),
        "--n",
        "4",
        "--steps",
        "5",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["passed"]
    assert report["requirement"] == "bit-identical"
    assert report["max_output_difference"] == report["max_log_prob_difference"] == report["max_ratio_deviation"] == 0
    assert [(one["precision"], one["micro_batch"]) for one in report["comparisons"]] == [
        ("fp32", 4), ("fp32", 2), ("fp32", 1), ("bf16", 4), ("bf16", 2), ("bf16", 1)
    ]  # fmt: skip
    assert [step["step"] for step in report["comparisons"][0]["steps"]] == [0, 1, 2, 3]
    others = [step for one in report["comparisons"] if one["precision"] == "fp32" for step in one["steps"]]
    assert max(step["log_prob"] for step in others) < 1e-5


def test_guided_samples_too_and_under_bf16_autocast(tiny_sd3_dir: Path, capfd: pytest.CaptureFixture[str]):
    arguments = ["--n", "4", "--steps", "4", "--guidance-scale", "4", "--precision", "bf16", "--json"]
    assert parity.main([str(tiny_sd3_dir), *arguments]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["max_log_prob_difference"] <= 1e-4


def test_a_trainer_that_computes_something_else_fails(
    tiny_sd3_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    predict = SD3.predict
    monkeypatch.setattr(SD3, "predict", lambda *a, **k: torch.nextafter(predict(*a, **k), torch.tensor(9.0)))
    assert parity.main([str(tiny_sd3_dir), "--n", "2", "--steps", "3"]) == 1
    assert "FAIL: required bit-identical" in capfd.readouterr().out


def test_a_wrong_model_is_an_error(capfd: pytest.CaptureFixture[str]):
    assert parity.main(["/nowhere"]) == 2
    assert "model_index.json" in capfd.readouterr().err
