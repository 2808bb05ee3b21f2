"""`headwater quickstart`: start every service, train a tiny model, and show that its reward has risen."""

import argparse
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import options, output

if TYPE_CHECKING:
    from headwater.cli.progress import Display
    from headwater.config.recipe import Recipe
    from headwater.supervisor.stack import Stack
    from headwater.supervisor.supervisor import Supervisor

RECIPE = "quickstart.toml"
PICTURE_SEEDS = (1, 2, 3)
_CHECK_INTERVAL_S = 0.5


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "quickstart",
        help="watch a tiny diffusion model learn through all services",
        description="Start every service on this machine, train a tiny model with recipes/quickstart.toml, and compare "
        "pictures and rewards before and after. Exit status 1 when the reward has not risen by three standard errors.",
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="recipe overrides, e.g. optimizer.lr=1e-3")
    parser.add_argument("--steps", metavar="N", type=int, help="training steps (the same as train.steps=N)")
    parser.add_argument("--seed", metavar="S", type=int, help="seed (the same as run.seed=S)")
    parser.add_argument("--keep-up", action="store_true", help="leave the services up at the end, until Ctrl-C")
    options.add_stack(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The whole tour. Returns 0 when the reward has risen, 1 when not, 130 when the run was stopped."""
    from headwater.cli import stack as stacks
    from headwater.cli.progress import make_display
    from headwater.supervisor.supervisor import Supervisor

    started = time.monotonic()
    folder = options.run_dir(args, "quickstart")
    stacks.stop_on_sigterm()
    display = make_display()
    with Supervisor(folder, display.say) as supervisor:
        stack = stacks.make_stack(args, folder, None if args.model else stacks.tiny_model(folder))
        recipe = load(args, stack.options.model)
        display.say(f"starting services; logs in {supervisor.logs_dir}")
        stack.start(supervisor)
        display.say(f"all services are up after {time.monotonic() - started:.0f} s")
        with display, _Watch(supervisor):
            figures = tour(stack, recipe, folder, display)
        figures["wall_time_s"] = round(time.monotonic() - started, 1)
        print(text(figures), flush=True)
        if args.keep_up:
            _keep_up(supervisor, stack, display)
    if args.json:
        output.print_json(figures)
    if figures["state"] != "succeeded":
        return 130
    return 0 if figures["reward_rises"] else 1


def load(args: argparse.Namespace, model: Path) -> "Recipe":
    """The quickstart recipe with the options and overrides of the command line."""
    from headwater import assets
    from headwater.config.load import load_recipe

    given = [f"train.steps={args.steps}"] if args.steps is not None else []
    given += [f"run.seed={args.seed}"] if args.seed is not None else []
    return load_recipe(assets.recipe(RECIPE), [f"model.path='{model}'", *given, *args.overrides])


def tour(stack: "Stack", recipe: "Recipe", folder: Path, display: "Display") -> dict[str, Any]:
    """Pictures, training, pictures; returns the figures. Writes before-after.png into the run folder."""
    from headwater.cli import pictures, train
    from headwater.cli.follow import RunFollower
    from headwater.cli.watch_router import RouterWatcher
    from headwater.client import WeightVersion
    from headwater.config.load import dump_toml
    from headwater.config.prompts import load_prompts

    prompts = [item.text for item in load_prompts(recipe.prompts)][:6]
    before = pictures.take(stack.ports.router, recipe, prompts, PICTURE_SEEDS)
    run_id, began = folder.name, time.monotonic()
    display.say(f"run {run_id}; recipe:\n{dump_toml(recipe)}")
    with RouterWatcher(stack.ports.router, display.say) as watcher:
        history = RunFollower(stack.ports.trainer, run_id, dump_toml(recipe), display).follow()
        training_s = time.monotonic() - began
        history.raise_if_failed()
        last = WeightVersion(run_id, history.run.weight_version.step)
        after = pictures.take(stack.ports.router, recipe, prompts, PICTURE_SEEDS, oldest=last)
        versions = {worker: list(steps) for worker, steps in watcher.versions.items()}
    grid = folder / "before-after.png"
    pictures.save_grid(before, after, grid, ("before training", f"after {history.run.step} steps"))
    figures = train.summary(history, wall_time_s=training_s)
    figures["training_time_s"] = figures.pop("wall_time_s")
    return {
        **figures,
        "reward_rises": figures["reward"] is not None and figures["reward"]["z"] > 3.0,
        "picture_reward_before": pictures.mean_reward(before),
        "picture_reward_after": pictures.mean_reward(after),
        "worker_weight_versions": versions,
        "grid": str(grid),
        "logs": str(folder / "logs"),
    }


def text(figures: dict[str, Any]) -> str:
    """The summary, on one screen."""
    from headwater.cli.train import summary_text

    verdict = "The reward has risen: " if figures["reward_rises"] else "The reward has NOT risen by 3 standard errors: "
    reward = figures["reward"]
    if reward is None:
        verdict += "the run is too short to tell; at least 8 steps are needed"
    else:
        verdict += (
            f"{reward['first_mean']:.4f} ± {reward['first_standard_error']:.4f} in the first quarter, "
            f"{reward['last_mean']:.4f} ± {reward['last_standard_error']:.4f} in the last, z = {reward['z']:.1f}"
        )
    shown = {key: value for key, value in figures.items() if key not in ("reward", "reward_rises")}
    shown["worker_weight_versions"] = {
        name: _ranges(steps) for name, steps in figures["worker_weight_versions"].items()
    }
    return f"\n{verdict}\n{summary_text(shown)}"


def _ranges(steps: list[int]) -> str:
    """0, 1, 2, 3 as "0…3 (4 versions)"."""
    return f"{steps[0]}…{steps[-1]} ({len(steps)} versions)" if steps else "none"


def _keep_up(supervisor: "Supervisor", stack: "Stack", display: "Display") -> None:
    display.say(f"services stay up (router {stack.ports.router}); Ctrl-C stops them")
    try:
        while True:
            time.sleep(_CHECK_INTERVAL_S)
            supervisor.check()
    except KeyboardInterrupt:
        display.say("stopping services")


class _Watch:
    """Reports services that die, from a thread, while the command waits for other things."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_INTERVAL_S):
            self._supervisor.check()
