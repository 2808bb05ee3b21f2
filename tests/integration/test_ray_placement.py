"""Workers placed on a real Ray cluster: a head without cores and two machines, each a raylet of this host."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from identities import identity, make

from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.router.v1 import router_pb2 as pb
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.rpc.channel import sync_channel
from headwater.supervisor import proctree

cluster_utils = pytest.importorskip("ray.cluster_utils")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

# Ray takes 127.0.0.1 for "this machine" and looks up the address of the network instead.
NODE = {"num_cpus": 1, "num_gpus": 0, "node_ip_address": "127.0.0.2", "include_dashboard": False}
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}  # fmt: skip
ON_CPU = ("--gpus-per-engine", "0")


def eventually(look, what: str, timeout_s: float = 60.0):
    """The first true value of `look()`."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)
    return found


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Program:
    """A process of a service and what it has logged."""

    def __init__(self, log: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self) -> None:
        if self.process.poll() is None:
            family = proctree.descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
            proctree.kill(family)


class Fleet:
    """A router with TLS and tokens, a Ray cluster, and placements of workers."""

    def __init__(self, folder: Path, files: Path, model: Path) -> None:
        self.folder, self.files, self.model = folder, files, model
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.router = f"127.0.0.1:{free.getsockname()[1]}"
        self.programs: list[Program] = []
        flags = ("--bind", self.router, "--heartbeat-interval-s", "0.3", *identity(files, "router", "worker").flags())
        self.start("headwater_router", *flags)
        self.ray = cluster_utils.Cluster(
            initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": QUICK_TO_NOTICE}
        )
        self.nodes = [self.ray.add_node(**NODE) for _ in range(2)]
        self.stub = RouterServiceStub(sync_channel(self.router, security=identity(files, "client", "client")))

    def start(self, *command: str) -> Program:
        env = {"RAY_ADDRESS": self.ray.address} if hasattr(self, "ray") else {}
        self.programs.append(Program(self.folder / f"{len(self.programs)}.log", *command, env=env))
        return self.programs[-1]

    def place(self, *flags: str, engine: str = "diffusers", placement: str = "ray") -> Program:
        return self.start(
            "headwater_rollout", "--placement", placement, "--model", str(self.model), "--engine", engine,
            "--precision", "fp32", "--router", self.router, *identity(self.files, "rollout", "worker").flags(), *flags,
        )  # fmt: skip

    def status(self) -> list[pb.WorkerStatus]:
        """The workers, as the router has them."""
        return list(self.stub.GetStatus(pb.GetStatusRequest(), timeout=10, wait_for_ready=True).workers)

    def workers(self) -> dict[str, str]:
        """Addresses by worker id."""
        return {worker.worker_id: worker.address for worker in self.status()}

    def submit(self, _: int = 0) -> str:
        """Which worker made a group of two pictures."""
        sampling = SamplingParams(steps=2, height_px=32, width_px=32)
        prompt = pb.Prompt(text="a red circle", sample_count=2, sampling=sampling, return_media=True)
        response = self.stub.SubmitPrompt(pb.SubmitPromptRequest(prompt=prompt), timeout=60)
        assert [sample.media.mime_type for sample in response.samples] == ["image/png"] * 2
        return response.outcome.worker_id

    def serves(self, *ids: str) -> bool:
        """Whether each of the workers makes groups now."""
        with ThreadPoolExecutor(4) as pool:
            return set(pool.map(self.submit, range(8))) >= set(ids)

    def close(self) -> None:
        for program in self.programs[::-1]:
            program.kill()
        self.ray.shutdown()


def states(placed: Program, worker_id: str, state: str) -> list[dict[str, str]]:
    """What the placing process has logged of a worker in a state, oldest first."""
    lines = re.findall(rf"replica (worker={worker_id} state={state}\b.*)", placed.text())
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, tiny_sd3_dir):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), make(tmp_path_factory.mktemp("certs")), tiny_sd3_dir)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def placed(fleet):
    """Two engines, on two machines. The tests below go through its life in order."""
    return fleet.place("--replicas", "2", "--strategy", "STRICT_SPREAD", *ON_CPU)


def serving(fleet: Fleet, placed: Program, worker_id: str, times: int) -> dict[str, str]:
    """What is known of the worker once it has come to serve for the n-th time."""
    eventually(lambda: len(states(placed, worker_id, "serving")) >= times, f"{worker_id} serves: {placed.log}")
    now = states(placed, worker_id, "serving")[-1]
    assert fleet.workers()[worker_id] == now["address"]
    return now


def test_each_replica_has_a_machine_of_its_own_and_makes_groups(fleet, placed):
    first, second = (serving(fleet, placed, name, 1) for name in ("rollout-0", "rollout-1"))
    assert first["node"] != second["node"]
    assert {first["node"], second["node"]} == {node.node_id[:8] for node in fleet.nodes}
    assert set(fleet.workers()) == {"rollout-0", "rollout-1"}
    eventually(lambda: fleet.serves("rollout-0", "rollout-1"), "both make groups")


def test_no_token_is_in_a_command_line_or_a_log(fleet, placed):
    tokens = [(fleet.files / f"{role}.token").read_bytes().strip() for role in ("worker", "admin")]
    pids = [int(states(placed, "rollout-0", "serving")[-1][name]) for name in ("actor_pid", "worker_pid")]
    for pid in (placed.process.pid, *pids):
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert content
            assert not any(token in content for token in tokens)
    assert b"worker.token" in Path(f"/proc/{pids[1]}/cmdline").read_bytes()
    assert not any(token.decode() in placed.text() for token in tokens)


@pytest.mark.parametrize(("victim", "times"), [("worker_pid", 2), ("actor_pid", 3)])
def test_what_is_killed_comes_back_under_the_same_id(fleet, placed, victim, times):
    before = serving(fleet, placed, "rollout-0", times - 1)
    os.kill(int(before[victim]), signal.SIGKILL)
    after = serving(fleet, placed, "rollout-0", times)
    assert not running(int(before["worker_pid"]))
    assert after["worker_pid"] != before["worker_pid"]
    assert after["node"] == before["node"]
    assert set(fleet.workers()) == {"rollout-0", "rollout-1"}
    eventually(lambda: fleet.serves("rollout-0", "rollout-1"), "both make groups")
    assert len(states(placed, "rollout-1", "serving")) == 1  # the other was left alone


def test_the_replica_of_a_dead_machine_comes_back_on_another(fleet, placed):
    before = serving(fleet, placed, "rollout-1", 1)
    (node,) = (node for node in fleet.nodes if node.node_id.startswith(before["node"]))
    fleet.ray.remove_node(node, allow_graceful=False)
    fleet.nodes.remove(node)
    eventually(lambda: len(states(placed, "rollout-1", "pending")) == 2, "its loss is noticed")
    assert not running(int(before["worker_pid"]))
    assert fleet.serves("rollout-0")  # meanwhile
    assert len(states(placed, "rollout-1", "starting")) == 1  # there is no room for it yet
    fleet.nodes.append(fleet.ray.add_node(**NODE))
    after = serving(fleet, placed, "rollout-1", 2)
    assert after["node"] == fleet.nodes[-1].node_id[:8]
    eventually(lambda: fleet.serves("rollout-0", "rollout-1"), "both make groups")


def test_sigterm_drains_all_and_gives_the_room_back(fleet, placed):
    last = [states(placed, name, "serving")[-1] for name in ("rollout-0", "rollout-1")]
    assert placed.stop() == 0, placed.text()
    assert fleet.workers() == {}  # deregistered, not expired
    for name in ("rollout-0", "rollout-1"):
        assert len(states(placed, name, "drained")) == 1
    assert not any(running(int(each["worker_pid"])) for each in last)
    groups = fleet.ray.global_state.placement_group_table()
    assert [group["state"] for group in groups.values()] == ["REMOVED"]
    assert "Traceback" not in placed.text()


@pytest.mark.engine
def test_the_sglang_engine_is_placed_and_finishes_its_group_on_sigterm(fleet):
    placed = fleet.place("--worker-id", "sgl", *ON_CPU, engine="sglang")
    eventually(lambda: states(placed, "sgl-0", "serving"), f"it serves: {placed.log}", 120)
    with ThreadPoolExecutor(1) as pool:
        sampling = SamplingParams(steps=30, height_px=64, width_px=64)
        prompt = pb.Prompt(text="a red circle", sample_count=8, sampling=sampling, return_media=True)
        running_group = pool.submit(fleet.stub.SubmitPrompt, pb.SubmitPromptRequest(prompt=prompt), timeout=60)
        eventually(lambda: any(worker.report.active_groups for worker in fleet.status()), "it is busy")
        assert placed.stop() == 0, placed.text()
        assert running_group.result().outcome.worker_id == "sgl-0"
    assert "sgl-0" not in fleet.workers()


def test_no_worker_outlives_a_killed_placing_process(fleet):
    placed = fleet.place("--worker-id", "orphan", *ON_CPU)
    worker = eventually(lambda: states(placed, "orphan-0", "serving"), f"it serves: {placed.log}")[-1]
    placed.process.kill()
    eventually(lambda: not running(int(worker["worker_pid"])), "the worker ends")
    tables = fleet.ray.global_state.placement_group_table
    eventually(lambda: all(group["state"] == "REMOVED" for group in tables().values()), "the room is given back")


@pytest.mark.parametrize(
    ("flags", "code", "messages"),
    [
        (
            ("--replicas", "5", "--strategy", "STRICT_SPREAD", "--placement-timeout-s", "2", *ON_CPU), 1,
            ["no room within 2 s for 5 × (CPU 1, GPU 0), strategy STRICT_SPREAD", "CPU 1, GPU 0", "Lower --replicas"],
        ),
        (("--placement-timeout-s", "1"), 1, ["1 × (CPU 1, GPU 1)", "--gpus-per-engine (0: on the CPU)"]),
        (("--ray-address", "127.0.0.1:9"), 1, ["no Ray cluster answers at --ray-address 127.0.0.1:9", "ray start"]),
        (("--ray-address", ""), 2, ["$RAY_ADDRESS", "`ray start --head`"]),
        (("--ray-address", "ray://127.0.0.1:10001"), 2, ["is a URL; give host:port"]),
        (("--redis", "redis://:secret@127.0.0.1:1"), 2, ["--redis-password-file"]),
        (("--advertise", "10.0.0.1:7410"), 2, ["--advertise names one worker"]),
        (("--model", "/nowhere", *ON_CPU), 1, ["model_index.json", "rollout-0 has ended 3 times"]),
    ],
    ids=["too many", "no GPU", "no cluster", "no address", "client address", "password", "advertise", "no model"],
)  # fmt: skip
def test_what_cannot_be_placed_is_an_error_with_its_remedy(fleet, flags, code, messages):
    program = fleet.place(*flags)
    assert program.end() == code, program.text()
    for message in messages:
        assert message in program.text()
    assert "Traceback" not in program.text()
    assert all(group["state"] == "REMOVED" for group in fleet.ray.global_state.placement_group_table().values())


def test_an_option_of_ray_without_ray_is_refused(fleet):
    program = fleet.place("--replicas", "2", placement="local")
    assert program.end() == 2
    assert "--replicas needs --placement ray" in program.text()


def test_workers_that_others_can_reach_need_tls_or_consent(fleet):
    program = fleet.start("headwater_rollout", "--placement", "ray", "--model", "m", "--router", "10.0.0.1:7400")
    assert program.end() == 1
    assert "--bind 0.0.0.0:0 is reachable from other machines" in program.text()
