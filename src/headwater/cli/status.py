"""`headwater status`: workers, queue, budgets and the run, on one screen."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from headwater.cli import options, output

if TYPE_CHECKING:
    from rich.console import RenderableType

_INTERVAL_S = 1.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("status", help="workers, queue, budgets and the run", description=__doc__)
    options.add_router(parser)
    options.add_trainer(parser)
    parser.add_argument("--watch", action="store_true", help="show it again every second until Ctrl-C")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the status once, or again and again."""
    from rich.console import Console
    from rich.live import Live

    status = collect(args.router, args.trainer)
    if args.json and not args.watch:
        output.print_json(status)
        return 0
    if not args.watch:
        Console().print(table(status))
        return 0
    with Live(table(status), console=Console(), refresh_per_second=4) as live:
        while True:
            time.sleep(_INTERVAL_S)
            status = collect(args.router, args.trainer)
            if args.json:
                output.print_json(status)
            live.update(table(status))


def collect(router: str, trainer: str) -> dict[str, Any]:
    """What router and trainer say. A trainer that does not answer, or has no run, is part of the status."""
    from google.protobuf.json_format import MessageToDict

    from headwater.cli.connect import connected
    from headwater.errors import HeadwaterError
    from headwater.router.v1.router_pb2 import GetStatusRequest
    from headwater.router.v1.router_pb2_grpc import RouterServiceStub
    from headwater.trainer.v1.trainer_pb2 import GetRunRequest
    from headwater.trainer.v1.trainer_pb2_grpc import TrainerServiceStub

    def plain(message: Any) -> dict[str, Any]:
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    with connected(router, "router") as channel:
        status = plain(RouterServiceStub(channel).GetStatus(GetStatusRequest(), timeout=10.0))
    run: dict[str, Any]
    try:
        with connected(trainer, "trainer") as channel:
            run = plain(TrainerServiceStub(channel).GetRun(GetRunRequest(), timeout=10.0).run)
    except HeadwaterError as error:
        run = {"note": error.message}
    return {"router": status, "run": run}


def table(status: dict[str, Any]) -> "RenderableType":
    """The status as tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    workers = Table("worker", "address", "state", "engine", "weights", "groups", "done", box=None)
    lines = [Text(_router_line(status["router"])), Text(_run_line(status["run"]))]
    notes = []
    for worker in status["router"]["workers"]:
        workers.add_row(*_worker_row(worker))
        notes += [Text(f"{worker['worker_id']}: {note}") for note in _notes(worker)]
    return Group(*lines, workers, *notes)


def _worker_row(worker: dict[str, Any]) -> list[str]:
    report, info = worker.get("report", {}), worker.get("info", {})
    return [
        worker["worker_id"],
        worker["address"],
        report.get("state", "").removeprefix("WORKER_STATE_").lower(),
        info.get("engine", ""),
        _version(report.get("weight_version")),
        f"{worker['assigned_groups']}/{worker['capacity_groups']}",
        report.get("finished_groups", "0"),
    ]


def _notes(worker: dict[str, Any]) -> list[str]:
    blocked = [] if worker["accepting"] else [worker["not_accepting_reason"]]
    return blocked + [condition["message"] for condition in worker.get("report", {}).get("conditions", ())]


def _router_line(router: dict[str, Any]) -> str:
    budgets = ", ".join(f"{b['run_id']} {b['charged_groups']}/{b['capacity_groups']}" for b in router["budgets"])
    return (
        f"router: {router['queued_prompts']} queued, {router['running_prompts']} running, "
        f"{router['finished_groups']} groups finished, {router['failed_prompts']} prompts failed, "
        f"{router['retried_attempts']} attempts repeated; budgets: {budgets or 'none'}"
    )


def _run_line(run: dict[str, Any]) -> str:
    if "note" in run:
        return f"run:    {run['note']}"
    state = run["state"].removeprefix("RUN_STATE_").lower()
    error = f"; {run['error']}" if run["error"] else ""
    served = _version(run.get("weight_version"))
    return f"run:    {run['run_id']} {state}, step {run['step']}/{run['total_steps']}, workers serve {served}{error}"


def _version(version: dict[str, Any] | None) -> str:
    return f"{version['run_id']}@{version['step']}" if version and version["run_id"] else "initial"
