"""A newcomer's tour, all of it real: quickstart, a second terminal, a reward server that dies and comes back."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from free_ports import free_port_base
from PIL import Image

from headwater.supervisor.proctree import descendants

HEADWATER = [sys.executable, "-m", "headwater.cli.main"]


class Quickstart:
    """A running quickstart and the lines it has written."""

    def __init__(self, run_dir: Path, base: int) -> None:
        self.process = subprocess.Popen(
            [*HEADWATER, "quickstart", "--run-dir", str(run_dir), "--port-base", str(base), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, pattern: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            found = next((line for line in self.lines if re.search(pattern, line)), None)
            if found is not None:
                return found
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s:\n" + self.text()
            assert self.process.poll() is None or self._reader.is_alive(), f"ended before {pattern!r}:\n" + self.text()
            time.sleep(0.1)

    def steps(self) -> int:
        return sum(bool(re.match(r"step [1-9]\d*/", line)) for line in self.lines)

    def text(self) -> str:
        return "\n".join(self.lines[-60:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        self._reader.join(10)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_quickstart_learns_serves_others_and_survives_the_loss_of_the_reward_server(tmp_path):
    base = free_port_base(17400, 30000)
    run_dir = tmp_path / "run"
    before = {proc.pid for proc in descendants(os.getpid())}
    tour = Quickstart(run_dir, base)
    again = None
    try:
        tour.wait_for(r"^step 2/", 300)
        submit_from_a_second_terminal(tmp_path / "out", base)
        again = lose_and_restart_the_reward_server(tour)
        tour.process.wait(600)
        left = {proc.pid for proc in descendants(os.getpid())} - before - {again.pid}
    finally:
        tour.stop()
        if again is not None:
            again.terminate()
            again.wait(30)
    assert tour.process.returncode == 0, tour.text()
    assert left == set()
    check_figures(json.loads(tour.lines[-1]), run_dir)


def submit_from_a_second_terminal(out: Path, base: int) -> None:
    command = [*HEADWATER, "submit", "a red circle", "-n", "4", "--out", str(out), "--rewards", "color_shape", "--json"]
    done = subprocess.run(
        [*command, "--router", f"127.0.0.1:{base}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results == json.loads((out / "results.json").read_text())
    assert len(results["samples"]) == 4
    for sample in results["samples"]:
        assert Image.open(out / sample["file"]).size == (64, 64)
        assert 0.0 <= sample["rewards"]["color_shape"] <= 1.0
    assert results["samples"][0]["weight_step"] >= 1


def lose_and_restart_the_reward_server(tour: Quickstart) -> subprocess.Popen[str]:
    """Kill it, see the run stop with a clear message, start it with the printed command, see the run go on."""
    (victim,) = (proc for proc in descendants(tour.process.pid) if "headwater_reward" in command_line(proc.pid))
    os.kill(victim.pid, signal.SIGKILL)
    tour.wait_for(r"^reward \(127\.0\.0\.1:\d+\) has ended with signal 9; progress stops until it is back", 30)
    tour.wait_for(r"reward server 127\.0\.0\.1:\d+.* does not answer", 60)
    time.sleep(2.0)  # a step whose groups had all been scored may still finish
    steps = tour.steps()
    time.sleep(5.0)
    assert tour.steps() == steps
    command = tour.wait_for(r"-m headwater_reward --bind", 5)
    again = subprocess.Popen(shlex.split(command), stderr=subprocess.DEVNULL, text=True)
    tour.wait_for(r"^reward .* is back", 60)
    tour.wait_for(rf"^step {steps + 1}/", 60)
    return again


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def check_figures(figures: dict, run_dir: Path) -> None:
    assert figures["state"] == "succeeded"
    assert figures["reward_rises"]
    assert figures["reward"]["z"] > 3.0
    assert figures["picture_reward_after"] > figures["picture_reward_before"]
    assert figures["log_prob_drift_max"] == 0.0
    assert figures["staleness_max"] == 0.0
    assert figures["worker_weight_versions"]["rollout-0"][-1] == figures["steps"]
    assert figures["weight_version"] == figures["steps"]
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    versions = [int(version) for version in re.findall(r"run=run version=(\d+)", log)]
    assert versions == sorted(versions)
    assert set(range(figures["steps"])) <= set(versions)
    assert Image.open(figures["grid"]).width > 600
