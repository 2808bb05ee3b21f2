"""The status of the router as figures for Prometheus."""

from collections.abc import Iterator

from headwater.rollout.v1.rollout_pb2 import WorkerState
from headwater.router.v1.router_pb2 import GetStatusResponse
from headwater.telemetry.metrics import Figure

_PREFIX = "WORKER_STATE_"


def figures(status: GetStatusResponse) -> Iterator[Figure]:
    """Queue, groups in flight, budgets, and each worker's load and weights."""
    yield Figure("headwater_router_queued_prompts", "Prompts that wait for a worker", status.queued_prompts)
    yield Figure("headwater_router_running_prompts", "Prompts that a worker is serving", status.running_prompts)
    yield Figure("headwater_router_queue_capacity", "Most waiting prompts without a budget", status.queue_capacity)
    yield Figure("headwater_router_finished_groups_total", "Groups finished since start", status.finished_groups)
    yield Figure("headwater_router_failed_prompts_total", "Prompts failed since start", status.failed_prompts)
    yield Figure("headwater_router_retried_attempts_total", "Attempts tried again elsewhere", status.retried_attempts)
    for budget in status.budgets:
        run = {"run_id": budget.run_id}
        yield Figure("headwater_router_budget_charged_groups", "Groups in flight of a run", budget.charged_groups, run)
        yield Figure("headwater_router_budget_capacity_groups", "Most groups in flight", budget.capacity_groups, run)
    for worker in status.workers:
        own = {"worker_id": worker.worker_id}
        state = WorkerState.Name(worker.report.state).removeprefix(_PREFIX).lower()
        yield Figure("headwater_worker_state", "1 for the state that a worker is in", 1, {**own, "state": state})
        yield Figure("headwater_worker_accepting", "Whether a worker is given groups", float(worker.accepting), own)
        yield Figure("headwater_worker_assigned_groups", "Groups that a worker has", worker.assigned_groups, own)
        yield Figure("headwater_worker_capacity_groups", "Groups it takes at once", worker.capacity_groups, own)
        yield Figure(
            "headwater_worker_finished_groups_total",
            "Groups since its start",
            worker.report.finished_groups,
            own,
        )
        version = worker.report.weight_version
        yield Figure(
            "headwater_worker_weight_step", "Step of the weights that a worker serves", version.step,
            {**own, "run_id": version.run_id},
        )  # fmt: skip
