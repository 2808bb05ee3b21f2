"""Train on recorded groups, under torchrun: FOLDER[:STOP_AFTER]... Each holds recipe.toml, groups.bin and blobs/.

Writes losses.jsonl (rank 0). With STOP_AFTER a checkpoint is written after that step and the training ends; a later
call resumes from it.
"""

import json
import sys
from pathlib import Path

import torch
from headwater_trainer.checkpoint import Checkpoints
from headwater_trainer.groups import Cursor, GroupBatch, SharedSource, Signal
from headwater_trainer.model import load_policy
from headwater_trainer.objectives import make_objective
from headwater_trainer.optimizer import make_optimizer
from headwater_trainer.ranks import Ranks, join
from headwater_trainer.train import Hooks, Trainer, train
from recorded import load_groups

from headwater.config.load import parse_recipe
from headwater.diffusion import families
from headwater.tensors.blobs import BlobStore


class RecordedSource:
    """The same groups on every run: a window of them for each step."""

    def __init__(self, groups, per_step, stop_after):
        self.groups, self.per_step, self.stop_after = groups, per_step, stop_after

    def take(self, step):
        if step == self.stop_after:
            return Signal.STOP
        first = step * self.per_step
        return GroupBatch(self.groups[first : first + self.per_step])

    def fail(self, group_id, reason):
        print(f"failed {group_id}: {reason}")

    def trained(self, step):
        pass

    def cursor(self):
        return Cursor(next_sequence=len(self.groups), consumed=["g00000000"])

    def settle(self):
        pass

    def close(self):
        pass


def run(folder: Path, stop_after: int, ranks: Ranks) -> None:
    recipe = parse_recipe((folder / "recipe.toml").read_text())
    source = RecordedSource(load_groups(folder / "groups.bin"), recipe.train.groups_per_step, stop_after)
    policy = load_policy(recipe, families.resolve(recipe.model.path), ranks)
    optimizer = make_optimizer(policy, recipe.optimizer)
    checkpoints = Checkpoints(folder / "checkpoints", ranks, keep=2)
    t = Trainer(
        recipe, policy, make_objective(recipe), optimizer,
        SharedSource(source if ranks.is_first else None, ranks), BlobStore(str(folder / "blobs")).get, ranks,
    )  # fmt: skip
    lines = []
    t.hooks = Hooks(report=lambda step, values: lines.append({"step": step, **values}))
    if (latest := checkpoints.latest()) is not None:
        t.state = checkpoints.load(latest, policy.tensors(), optimizer)
        assert t.state.cursor.consumed == ["g00000000"]
    if not train(t):
        t.state.cursor = t.source.cursor()
        checkpoints.save(t.state, policy.tensors(), optimizer, "")
    weights = policy.changed_weights()
    total = sum(float(value.double().abs().sum()) for value in weights.values())
    if ranks.is_first:
        with (folder / "losses.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        (folder / "weights.json").write_text(json.dumps({"sum": total, "names": sorted(weights)}))


def main(jobs: list[str]) -> None:
    torch.set_num_threads(1)
    with join("cpu", 60.0) as ranks:
        for job in jobs:
            folder, _, stop_after = job.partition(":")
            run(Path(folder), int(stop_after or -1), ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
