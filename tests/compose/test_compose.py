"""deploy/compose.yaml on a real Docker engine, in the order of a day's work: start, use, train, scale, break, stop.

Takes several minutes and an engine: `make test-compose`. The images must be built (`make compose-build`).
"""

import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import HEADWATER, SERVICES, Fleet

pytestmark = [
    pytest.mark.skipif(not os.environ.get("COMPOSE_TEST"), reason="needs a Docker engine: make test-compose"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

STEPS = 48
RECIPE = str(Path(__file__).with_name("recipe.toml"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("compose"))
    fleet.prepare()
    try:
        started = time.monotonic()
        fleet.compose("up", "-d", "--no-build")
        for service in SERVICES:
            fleet.wait_healthy(service)
        print(f"\nevery container is healthy after {time.monotonic() - started:.1f} s")
        fleet.headwater("submit", "a red circle", "--out", str(fleet.secrets.parent / "first"))
        print(f"first picture on the host after {time.monotonic() - started:.1f} s from `up`")
        yield fleet
    finally:
        if fleet.leftovers():
            fleet.compose("down", "-v", "--timeout", "10")


class TrainingRun:
    """`headwater train` on the host, and what it says."""

    def __init__(self, fleet: Fleet, *overrides: str) -> None:
        self.process = subprocess.Popen(
            [*HEADWATER, "train", RECIPE, *overrides, "--run-id", "compose", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=fleet.client_environment(),
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)

    def step(self) -> int:
        return max((int(found[1]) for line in self.lines if (found := re.match(r"step (\d+)/", line))), default=0)

    def wait_steps(self, more: int, timeout_s: float = 180.0) -> None:
        """Until the run has done `more` steps from now: whatever was done to it, it goes on."""
        wanted, deadline = min(self.step() + more, STEPS), time.monotonic() + timeout_s
        while self.step() < wanted:
            assert self.process.poll() is None or self.step() >= wanted, "\n".join(self.lines[-40:])
            assert time.monotonic() < deadline, f"no step in {timeout_s} s:\n" + "\n".join(self.lines[-40:])
            time.sleep(0.2)


def workers(fleet: Fleet) -> list[dict[str, object]]:
    return list(fleet.headwater("status")["router"]["workers"])


def test_containers_are_locked_down(fleet: Fleet):
    for container in fleet.containers():
        form = "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.Memory}} {{.HostConfig.CapDrop}}"
        user, read_only, memory, dropped = fleet.call(["docker", "inspect", "-f", form, container]).split()
        assert user not in ("", "0", "root")
        assert read_only == "true"
        assert int(memory) > 0
        assert dropped == "[ALL]"
        ports = fleet.call(["docker", "port", container])
        assert all(line.split(" -> ")[1].startswith("127.0.0.1:") for line in ports.splitlines())
    for service in ("redis", "reward", "rollout"):
        assert fleet.call(["docker", "port", fleet.containers(service)[0]]) == ""


def test_no_secret_stands_in_an_environment_or_on_a_command_line(fleet: Fleet):
    hidden = [path.read_text().strip() for path in fleet.secrets.glob("*") if path.suffix in ("", ".token")]
    assert len(hidden) == 4  # Redis' password and three tokens
    for container in fleet.containers():
        shown = fleet.call(["docker", "inspect", container])
        shown += fleet.call(["docker", "top", container, "-eo", "pid,args"])
        assert not [secret for secret in hidden if secret in shown]


def test_the_host_needs_a_certificate_and_a_token_of_the_right_role(fleet: Fleet):
    command = [*HEADWATER, "train", RECIPE, "--run-id", "refused"]
    bare = {name: value for name, value in fleet.client_environment().items() if not name.startswith("HEADWATER_T")}
    bare |= {"HEADWATER_TRAINER": fleet.client_environment()["HEADWATER_TRAINER"]}
    for env in (bare, fleet.client_environment("client")):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
        assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "admin" in done.stderr  # the client's token may look, not train


def test_the_dashboard_shows_the_worker(fleet: Fleet):
    url = f"http://127.0.0.1:{fleet.ports['DASHBOARD_PORT']}/api/status"
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert b'"ok":true' in reply.read()


@pytest.fixture
def run(fleet: Fleet) -> Iterator[TrainingRun]:
    run = TrainingRun(fleet, f"train.steps={STEPS}")
    yield run
    run.process.kill()
    run.process.wait(10)


def test_a_run_learns_while_services_are_scaled_and_killed(fleet: Fleet, run: TrainingRun):
    run.wait_steps(2)

    fleet.scale("reward", 3)
    fleet.scale("rollout", 2)
    fleet.wait_healthy("reward", 3)
    fleet.wait_healthy("rollout", 2)
    deadline = time.monotonic() + 60
    while sum(int(str(worker["report"]["finished_groups"])) > 0 for worker in workers(fleet)) < 2:  # type: ignore[index]
        assert time.monotonic() < deadline, "the second worker got no group"
        time.sleep(1.0)
    run.wait_steps(2)
    used = [c for c in fleet.containers("reward") if established(fleet, c)]
    assert len(used) == 3, "a reward server that was added is not used"

    for service in ("rollout", "reward", "redis", "router", "trainer", "dashboard"):
        for container in fleet.containers(service):
            assert run.step() < STEPS - 4, "the run is too short for this test"
            fleet.wait_restarted(container, fleet.kill_main_process(container))
            run.wait_steps(1)
            print(f"{service} {container} was killed; the run goes on at step {run.step()}")

    fleet.scale("rollout", 1)
    fleet.scale("reward", 1)
    run.wait_steps(2)
    for service in SERVICES:
        fleet.wait_healthy(service)

    assert run.process.wait(600) == 0, "\n".join(run.lines[-40:])
    figures = json.loads(run.lines[-1])
    print(figures)
    assert figures["state"] == "succeeded"
    assert figures["steps"] == STEPS
    assert figures["reward"]["z"] > 3, "the reward has not risen"
    recorded = fleet.compose("exec", "-T", "trainer", "cat", "/var/lib/headwater/runs/compose/metrics.jsonl")
    assert [json.loads(line)["step"] for line in recorded.splitlines()] == list(range(1, STEPS + 1))


def established(fleet: Fleet, container: str) -> bool:
    """Whether another container is connected to port 7401 of this one."""
    table = fleet.call(["docker", "exec", container, "cat", "/proc/net/tcp", "/proc/net/tcp6"])
    rows = [row.split() for row in table.splitlines() if ":1CE9" in row]  # 7401
    outside = [(local, state) for _, local, _, state, *_ in rows if not local.endswith("0100007F:1CE9")]
    return any(local.endswith(":1CE9") and state == "01" for local, state in outside)


def test_down_leaves_nothing(fleet: Fleet):
    fleet.compose("down", "-v")
    assert fleet.leftovers() == []
