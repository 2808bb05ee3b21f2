"""`headwater train RECIPE [key=value …]`: train with running services and watch it."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import options, output

if TYPE_CHECKING:
    from headwater.cli.follow import RunHistory
    from headwater.config.recipe import Recipe


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="train with running services",
        description="Train by a recipe with running services, and watch it. Ctrl-C stops after the current step.",
    )
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="TOML file, e.g. recipes/quickstart.toml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="e.g. train.steps=50 optimizer.lr=1e-4")
    parser.add_argument("--run-id", help="name of the run; an ended one is resumed (default: RECIPE-TIME)")
    options.add_router(parser)
    options.add_trainer(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the recipe, start the run, follow it, and print a summary."""
    from headwater.cli.follow import RunFollower
    from headwater.cli.progress import make_display
    from headwater.config.load import dump_toml
    from headwater.trainer.v1.trainer_pb2 import RunState

    recipe = load(args.recipe, args.overrides, args.router)
    run_id = args.run_id or f"{args.recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    started = time.monotonic()
    with make_display() as display:
        display.say(f"run {run_id} on {args.trainer}; recipe:\n{dump_toml(recipe)}")
        history = RunFollower(args.trainer, run_id, dump_toml(recipe), display).follow()
    history.raise_if_failed()
    figures = summary(history, wall_time_s=time.monotonic() - started)
    print(summary_text(figures))
    if args.json:
        output.print_json(figures)
    return 0 if history.run.state == RunState.RUN_STATE_SUCCEEDED else 130


def load(path: Path, overrides: list[str], router: str) -> "Recipe":
    """The recipe; without model.path it gets the model that the workers of `router` serve."""
    from headwater.config.load import load_table, recipe_from_table

    table = load_table(path, overrides)
    model = table.setdefault("model", {})
    if isinstance(model, dict) and "path" not in model:
        model["path"] = _served_model(router)
    elif isinstance(model, dict) and isinstance(model["path"], str) and Path(model["path"]).is_dir():
        model["path"] = str(Path(model["path"]).resolve())
    return recipe_from_table(table, source=str(path))


def _served_model(router: str) -> str:
    from headwater.cli.connect import connected
    from headwater.errors import FailedPrecondition
    from headwater.router.v1.router_pb2 import GetStatusRequest
    from headwater.router.v1.router_pb2_grpc import RouterServiceStub

    with connected(router, "router") as channel:
        status = RouterServiceStub(channel).GetStatus(GetStatusRequest(), timeout=10.0)
    models = sorted({worker.info.model for worker in status.workers if worker.info.model})
    if len(models) != 1:
        found = f"the workers serve {models}" if models else "no rollout worker is registered"
        raise FailedPrecondition(f"the recipe has no model.path and {found}; pass model.path=DIR", field="model.path")
    return models[0]


def summary(history: "RunHistory", wall_time_s: float) -> dict[str, Any]:
    """The figures of a run, as `--json` prints them."""
    from headwater.cli.figures import summarize
    from headwater.trainer.v1.trainer_pb2 import RunState

    state = RunState.Name(history.run.state).removeprefix("RUN_STATE_").lower()
    return {
        "run_id": history.run.run_id,
        "state": state,
        **summarize(history.steps),
        "weight_version": history.run.weight_version.step,
        "output_dir": history.run.output_dir,
        "last_checkpoint": history.checkpoints[-1] if history.checkpoints else None,
        "wall_time_s": round(wall_time_s, 2),
    }


def summary_text(figures: dict[str, Any]) -> str:
    """The figures on one screen."""
    return "\n".join(f"{key.replace('_', ' '):<32} {_show(value)}" for key, value in figures.items())


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "  ".join(f"{key}={_show(item)}" for key, item in value.items())
    return "-" if value is None else str(value)
