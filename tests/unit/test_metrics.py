"""Figures for Prometheus."""

import socket
import urllib.request

import pytest
from headwater_router.metrics import figures

from headwater.errors import InvalidArgument, Unavailable
from headwater.rollout.v1.rollout_pb2 import WorkerState
from headwater.router.v1.router_pb2 import BudgetStatus, GetStatusResponse, WorkerReport, WorkerStatus
from headwater.telemetry.metrics import Figure, serve_metrics


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        return str(reply.read().decode())


def test_what_a_scrape_reads_is_the_present_value():
    port, values = free_port(), {"n": 1.0}
    serve_metrics(
        f"127.0.0.1:{port}",
        lambda: [Figure("hw_queue", "Waiting", values["n"], {"of": "a"}), Figure("hw_done_total", "Done", 7)],
    )
    assert 'hw_queue{of="a"} 1.0' in scrape(port)
    values["n"] = 2.5
    text = scrape(port)
    assert 'hw_queue{of="a"} 2.5' in text
    assert "# TYPE hw_done_total counter" in text
    assert "hw_done_total 7.0" in text


def test_a_taken_port_and_a_bad_address_are_errors_with_a_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Unavailable, match="choose another port with --metrics-bind"):
            serve_metrics(f"127.0.0.1:{taken.getsockname()[1]}", list)
    with pytest.raises(InvalidArgument, match="not host:port"):
        serve_metrics("9400", list)
    serve_metrics("", list)  # none wanted


def test_router_figures_tell_queue_budget_and_each_worker():
    report = WorkerReport(state=WorkerState.WORKER_STATE_READY, finished_groups=5)
    report.weight_version.run_id, report.weight_version.step = "r", 3
    status = GetStatusResponse(
        queued_prompts=4,
        running_prompts=2,
        budgets=[BudgetStatus(run_id="r", capacity_groups=12, charged_groups=9)],
        workers=[WorkerStatus(worker_id="w0", report=report, assigned_groups=1, capacity_groups=2, accepting=True)],
    )
    found = {(f.name, *f.labels.values()): f.value for f in figures(status)}
    assert found["headwater_router_queued_prompts",] == 4
    assert found["headwater_router_budget_charged_groups", "r"] == 9
    assert found["headwater_worker_state", "w0", "ready"] == 1
    assert found["headwater_worker_weight_step", "w0", "r"] == 3
    assert found["headwater_worker_finished_groups_total", "w0"] == 5
