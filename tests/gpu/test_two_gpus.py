"""Two GPUs: verified weight updates over NCCL into a worker process, and the whole loop."""

import json
import subprocess
import sys
import time

import pytest
import torch
from headwater_trainer.weight_sender import WeightSender

from headwater.diffusion import families
from headwater.supervisor.stack import Stack, StackOptions
from headwater.supervisor.supervisor import Supervisor
from headwater.supervisor.valkey import valkey_spec

pytestmark = pytest.mark.two_gpus


def test_nccl_updates_are_verified_and_fast(model, tmp_path):
    stack = Stack(StackOptions(model=model, precision="bf16", port_base=17400, rewards="color_shape"), tmp_path)
    weights = families.resolve(model).load_component(model, "transformer", torch.float32).to("cuda:0")
    tensors = {name: parameter.detach() for name, parameter in weights.named_parameters()}
    with Supervisor(tmp_path) as supervisor:
        valkey = valkey_spec(tmp_path / "valkey", stack.ports.redis)
        for specs in ((valkey,), (stack.router_spec(), stack.reward_spec()), (stack.rollout_spec(0),)):
            supervisor.wait_ready([supervisor.start(spec) for spec in specs])
        sender = WeightSender(stack.ports.router, "nccl", "transformer", timeout_s=60)
        deadline = time.monotonic() + 30
        while not (report := sender.publish(tensors, 0)).updated:
            assert time.monotonic() < deadline, report
            time.sleep(0.5)
        for step in range(1, 6):
            report = sender.publish({name: tensor + 0.001 * step for name, tensor in tensors.items()}, step)
            print(f"\n{report}")
            assert (report.updated, report.lost, report.transport) == (["rollout-0"], {}, "TRANSPORT_NCCL")
        sender.close()


def test_the_whole_loop_learns_on_two_gpus(tmp_path):
    command = [sys.executable, "-m", "headwater.cli.main", "quickstart", "--port-base", "17500", "--run-dir",
               str(tmp_path / "run"), "--rewards", "color_shape", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    print(done.stdout[-3000:], done.stderr[-3000:])
    assert done.returncode == 0
    summary = json.loads(done.stdout.splitlines()[-1])
    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert "TRANSPORT_NCCL" in log
    print(summary)
