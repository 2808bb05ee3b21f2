"""A trainer over two torchrun nodes of one rank each: the losses of two ranks on one node, and a rank that dies."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.rpc.channel import sync_channel
from headwater.supervisor import proctree
from headwater.trainer.v1.trainer_pb2 import GetRunRequest, RunState, StartRunRequest
from headwater.trainer.v1.trainer_pb2_grpc import TrainerServiceStub

pytestmark = pytest.mark.slow
RECIPE = """
[model]
path = "{model}"
[objective]
name = "sft"
[data]
generator = "synthetic"
count = 20
batch_size = 6
processes = 1
[sampling]
steps = 2
height_px = 64
width_px = 64
[prompts]
texts = ["a red circle"]
[train]
steps = 16
micro_batch_size = 3
checkpoint_every = 2
[optimizer]
lr = 1e-3
[run]
deterministic = true
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Nodes:
    """torchrun agents of one trainer, each with its own log, as they would be on machines of their own."""

    def __init__(self, folder: Path, count: int, ranks_per_node: int) -> None:
        self.folder = folder
        folder.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node",
            str(ranks_per_node), "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", folder.name,
            "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", "-m", "headwater_trainer",
            "--bind", self.address, "--blob-root", str(folder / "blobs"), "--output-dir", str(folder / "out"),
            "--device", "cpu", "--collective-timeout-s", "60",
        ]  # fmt: skip
        self.agents = []
        for index in range(count):
            with (folder / f"{index}.log").open("wb") as log:
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                self.agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
        self.stub = TrainerServiceStub(sync_channel(self.address))

    def logs(self) -> str:
        return "\n".join((self.folder / f"{index}.log").read_text() for index in range(len(self.agents)))

    def start(self, model: Path) -> None:
        request = StartRunRequest(run_id="r", recipe_toml=RECIPE.format(model=model))
        self.stub.StartRun(request, timeout=90, wait_for_ready=True)

    def metrics(self) -> list[dict]:
        path = self.folder / "out/r/metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self, timeout_s: float = 120.0) -> list[dict]:
        """Wait for the end of the run; the figures of its steps."""
        deadline = time.monotonic() + timeout_s
        while True:
            assert time.monotonic() < deadline, self.logs()
            run = self.stub.GetRun(GetRunRequest(run_id="r"), timeout=120, wait_for_ready=True).run
            if run.state == RunState.RUN_STATE_SUCCEEDED:
                return self.metrics()
            assert run.state != RunState.RUN_STATE_FAILED, self.logs()
            time.sleep(0.2)

    def rank(self, number: int) -> tuple[int, int]:
        """Which agent has a rank, and the process of that rank."""
        for index, agent in enumerate(self.agents):
            for child in proctree.descendants(agent.pid):
                variables = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
                if f"RANK={number}".encode() in variables:
                    return index, child.pid
        raise AssertionError(f"no rank {number}")

    def kill(self) -> None:
        for agent in self.agents:
            family = proctree.descendants(agent.pid)
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            agent.wait()
            proctree.kill(family)


@contextlib.contextmanager
def nodes(folder: Path, count: int, ranks_per_node: int):
    started = Nodes(folder, count, ranks_per_node)
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory, tiny_sd3_dir):
    """The figures of two ranks on one node."""
    with nodes(tmp_path_factory.mktemp("one") / "run", 1, 2) as trainer:
        trainer.start(tiny_sd3_dir)
        return trainer.finish()


def same(one: list[dict], other: list[dict]) -> None:
    assert [line["step"] for line in one] == [line["step"] for line in other] == list(range(1, 17))
    for a, b in zip(one, other, strict=True):
        assert a["grad_norm"] > 0
        for name in ("loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], abs=1e-6), (a["step"], name)


def test_two_nodes_give_the_losses_of_one_and_leave_together(on_one_node, tmp_path, tiny_sd3_dir):
    with nodes(tmp_path / "two", 2, 1) as trainer:
        trainer.start(tiny_sd3_dir)
        same(on_one_node, trainer.finish())
        first, process = trainer.rank(0)
        assert trainer.rank(1)[0] != first
        os.kill(process, signal.SIGTERM)  # rank 0 tells the others to leave
        assert [agent.wait(60) for agent in trainer.agents] == [0, 0], trainer.logs()
        assert "trainer listens on" in (trainer.folder / f"{first}.log").read_text()
        assert "trainer listens on" not in (trainer.folder / f"{1 - first}.log").read_text()


@pytest.mark.xfail(
    strict=False, reason="torchrun's restart at times meets gloo's ports of the dead rank and does not end in time"
)
def test_a_rank_that_dies_is_started_again_and_the_run_goes_on(on_one_node, tmp_path, tiny_sd3_dir):
    with nodes(tmp_path / "two", 2, 1) as trainer:
        trainer.start(tiny_sd3_dir)
        deadline = time.monotonic() + 60
        while len(trainer.metrics()) < 4:
            assert time.monotonic() < deadline, trainer.logs()
            time.sleep(0.02)
        os.kill(trainer.rank(1)[1], signal.SIGKILL)
        same(on_one_node, trainer.finish())
        assert "run r was interrupted and is continued" in trainer.logs()
