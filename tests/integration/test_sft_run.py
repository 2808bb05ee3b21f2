"""Supervised runs: from pictures to an exported pipeline, and bit for bit the same after an interruption."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from headwater_trainer.config import TrainerConfig
from headwater_trainer.frontend import Frontend
from headwater_trainer.ranks import Ranks, RunFailed, join
from headwater_trainer.run import execute
from headwater_trainer.runs import RunRecord
from safetensors.torch import load_file

from headwater.synthetic.__main__ import write_pairs
from headwater.trainer.v1.trainer_pb2 import Run, RunState, StartRunRequest

RECIPE = """
[model]
path = "{model}"
[objective]
name = "sft"
[data]
{data}
batch_size = 6
caption_dropout = 0.3
processes = 1
[sampling]
steps = 2
height_px = 64
width_px = 64
[prompts]
texts = ["a red circle", "two blue stars"]
[pictures]
every = 4
count = 3
[train]
steps = 4
micro_batch_size = 4
checkpoint_every = 2
[optimizer]
lr = 1e-3
schedule = "one_cycle"
[ema]
max_decay = 0.9
[export]
dtype = "bf16"
[run]
deterministic = true
"""
GENERATED = 'generator = "synthetic"\ncount = 20'


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with join("cpu") as joined:
        yield joined


class StopsAfter(RunRecord):
    """A record whose user stops the run once, after some steps."""

    def __init__(self, steps: int | None) -> None:
        super().__init__(Run(run_id="r"))
        self._steps = steps

    @property
    def stop_requested(self) -> bool:
        return self._steps is not None and self.run.step >= self._steps


def train(
    folder: Path, model: Path, ranks: Ranks, *, data: str = GENERATED, stop_after: int | None = None, more: str = ""
) -> RunRecord:
    record = StopsAfter(stop_after)
    config = TrainerConfig(bind="", router="", redis="", blob_root="", output_dir=folder)
    text = RECIPE.format(model=model, data=data) + more
    execute(StartRunRequest(run_id="r", recipe_toml=text), config, ranks, Frontend(record, None))  # type: ignore[arg-type]
    return record


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "r/export/step_00000004/transformer/diffusion_pytorch_model.safetensors")


def test_a_run_learns_draws_and_exports(tiny_sd3_dir: Path, tmp_path: Path, ranks: Ranks):
    record = train(tmp_path, tiny_sd3_dir, ranks)
    assert record.run.state == RunState.RUN_STATE_SUCCEEDED
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["images"] == 6 and line["loss"] > 0 for line in lines)
    assert (tmp_path / "r/pictures/step_00000004.png").is_file()
    before = load_file(tiny_sd3_dir / "transformer/diffusion_pytorch_model.safetensors")
    after = exported(tmp_path)
    assert after.keys() == before.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    name = "transformer_blocks.0.attn.to_q.weight"
    assert not torch.equal(after[name], before[name].bfloat16())


def test_an_interrupted_run_ends_like_one_that_was_not(tiny_sd3_dir: Path, tmp_path: Path, ranks: Ranks):
    train(tmp_path / "whole", tiny_sd3_dir, ranks)
    stopped = train(tmp_path / "parts", tiny_sd3_dir, ranks, stop_after=3)
    assert stopped.run.state == RunState.RUN_STATE_STOPPED
    torch.manual_seed(99)
    torch.randn(7)
    train(tmp_path / "parts", tiny_sd3_dir, ranks)
    whole, parts = exported(tmp_path / "whole"), exported(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / part / "r/metrics.jsonl").read_text().splitlines()]
        for part in ("whole", "parts")
    ]
    assert losses[0] == losses[1]


def test_a_file_of_pictures_and_lora(tiny_sd3_dir: Path, tmp_path: Path, ranks: Ranks):
    write_pairs(tmp_path / "pairs", count=7, seed=0, split="train", size_px=80, tags=["colors", "counting"])
    data = f'path = "{tmp_path / "pairs" / "pairs.jsonl"}"'
    train(tmp_path, tiny_sd3_dir, ranks, data=data, more="[lora]\nrank = 2\nalpha = 4.0\n")
    before = load_file(tiny_sd3_dir / "transformer/diffusion_pytorch_model.safetensors")
    after = exported(tmp_path)
    changed = {name for name in before if not torch.equal(after[name], before[name].bfloat16())}
    assert changed
    assert all(".attn." in name for name in changed)
    caches = list((tmp_path / "cache").iterdir())
    (tmp_path / "pairs/images/000003.png").write_bytes((tmp_path / "pairs/images/000004.png").read_bytes())
    train(tmp_path / "again", tiny_sd3_dir, ranks, data=data + f'\ncache_dir = "{tmp_path / "cache"}"')
    assert len(list((tmp_path / "cache").iterdir())) == len(caches) + 1


def test_a_line_without_a_picture_is_named(tiny_sd3_dir: Path, tmp_path: Path, ranks: Ranks):
    (tmp_path / "pairs.jsonl").write_text('{"image": "nowhere.png", "prompt": "a red circle"}\n')
    with pytest.raises((RunFailed, Exception), match=r"line 1 of .* names a picture that is not there"):
        train(tmp_path, tiny_sd3_dir, ranks, data=f'path = "{tmp_path / "pairs.jsonl"}"')
