"""`headwater quickstart`: start every service, train the model in the box, and measure what held-out prompts gain."""

import argparse
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import options, output

if TYPE_CHECKING:
    from headwater.cli.follow import RunHistory
    from headwater.cli.progress import Display
    from headwater.config.recipe import Recipe
    from headwater.evaluation.plan import Plan
    from headwater.supervisor.stack import Stack
    from headwater.supervisor.supervisor import Supervisor

RECIPE = "quickstart.toml"
HELD_OUT = "prompts/tiny_geneval_eval.jsonl"
SCORE = "tiny-geneval"  # right or wrong, where the recipe trains on partial credit
_CHECK_INTERVAL_S = 0.5


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "quickstart",
        help="watch a small diffusion model learn through all services",
        description="Start every service on this machine, evaluate the model in the box on held-out prompts, train it "
        "with recipes/quickstart.toml, evaluate it again. Exit status 1 when the 95 % interval of the gain includes 0.",
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="recipe overrides, e.g. optimizer.lr=1e-3")
    parser.add_argument("--steps", metavar="N", type=int, help="training steps (the same as train.steps=N)")
    parser.add_argument("--seed", metavar="S", type=int, help="seed (the same as run.seed=S)")
    parser.add_argument(
        "--eval-samples",
        metavar="N",
        type=int,
        default=2,
        help="pictures of each held-out prompt (default 2)",
    )
    parser.add_argument("--keep-up", action="store_true", help="leave the services up at the end, until Ctrl-C")
    options.add_stack(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The whole tour. Returns 0 when accuracy has risen, 1 when not, 130 when the run was stopped."""
    from headwater.cli import stack as stacks
    from headwater.cli.progress import make_display
    from headwater.supervisor.supervisor import Supervisor

    started = time.monotonic()
    folder = options.run_dir(args, "quickstart")
    stacks.stop_on_sigterm()
    display = make_display()
    with Supervisor(folder, display.say) as supervisor:
        stack = stacks.make_stack(args, folder)
        recipe = load(args, stack.options.model)
        plan = held_out(recipe, args.eval_samples)
        display.say(f"starting services; logs in {supervisor.logs_dir}")
        stack.start(supervisor)
        display.say(f"all services are up after {time.monotonic() - started:.0f} s")
        with display, _Watch(supervisor):
            figures = tour(stack, recipe, plan, folder, display)
        figures["wall_time_s"] = round(time.monotonic() - started, 1)
        print(text(figures), flush=True)
        if args.keep_up:
            _keep_up(supervisor, stack, display)
    if args.json:
        output.print_json(figures)
    if figures["state"] != "succeeded":
        return 130
    return 0 if figures["accuracy_rises"] else 1


def load(args: argparse.Namespace, model: Path) -> "Recipe":
    """The quickstart recipe with the options and overrides of the command line."""
    from headwater import assets
    from headwater.config.load import load_recipe

    given = [f"train.steps={args.steps}"] if args.steps is not None else []
    given += [f"run.seed={args.seed}"] if args.seed is not None else []
    return load_recipe(assets.recipe(RECIPE), [f"model.path='{model}'", *given, *args.overrides])


def held_out(recipe: "Recipe", samples_per_prompt: int) -> "Plan":
    """The evaluation before and after: prompts that are not trained on; the recipe's monitors beside the score."""
    from headwater import assets
    from headwater.common.v1.reward_pb2 import RewardSpec
    from headwater.config.prompts import load_prompts
    from headwater.config.recipe import PromptsSection
    from headwater.evaluation.plan import Plan

    path = assets.recipe(HELD_OUT)
    monitors = [reward.to_proto() for reward in recipe.rewards if reward.role == "monitor"]
    return Plan(
        prompts_path=path,
        items=tuple(load_prompts(PromptsSection(path=str(path)))),
        sampling=recipe.sampling.to_ode_proto(),
        rewards=(RewardSpec(name=SCORE), *monitors),
        samples_per_prompt=samples_per_prompt,
    )


def tour(stack: "Stack", recipe: "Recipe", plan: "Plan", folder: Path, display: "Display") -> dict[str, Any]:
    """Evaluation, training, evaluation; returns the figures. Writes before-after.png into the run folder."""
    from headwater.cli import train
    from headwater.cli.eval import evaluate
    from headwater.cli.watch_router import RouterWatcher
    from headwater.common.v1.sample_pb2 import WeightVersion
    from headwater.evaluation.report import report

    router = stack.ports.router
    display.say(f"held-out accuracy before training, {len(plan.items) * plan.samples_per_prompt} pictures")
    before = evaluate(router, plan, folder / "before")
    began = time.monotonic()
    with RouterWatcher(router, display.say) as watcher:
        history = follow(stack, recipe, folder.name, display)
        training_s = time.monotonic() - began
        history.raise_if_failed()
        display.say("held-out accuracy after training")
        last = WeightVersion(run_id=folder.name, step=history.run.weight_version.step)
        after = evaluate(router, replace(plan, min_version=last), folder / "after", folder / "before")
        versions = {worker: list(steps) for worker, steps in watcher.versions.items()}
    display.say(report(after))
    figures = train.summary(history, wall_time_s=training_s)
    figures["training_time_s"] = figures.pop("wall_time_s")
    difference = after["comparison"]["difference"]["overall"]
    return {
        **figures,
        "accuracy_rises": difference["score"]["ci95"][0] > 0,
        "accuracy": {
            when: found["results"]["overall"]["score"] for when, found in (("before", before), ("after", after))
        }
        | {"difference": difference["score"]},
        "monitors": {name: difference[name] for name in _monitors(plan) if name in difference},
        "evaluation_time_s": round(before["wall_time_s"] + after["wall_time_s"], 2),
        "worker_weight_versions": versions,
        "grid": _side_by_side(before["grid"], after["grid"], folder / "before-after.png"),
        "logs": str(folder / "logs"),
    }


def follow(stack: "Stack", recipe: "Recipe", run_id: str, display: "Display") -> "RunHistory":
    """Start the run and follow it to its end."""
    from headwater.cli.follow import RunFollower
    from headwater.config.load import dump_toml

    display.say(f"run {run_id}; recipe:\n{dump_toml(recipe)}")
    return RunFollower(stack.ports.trainer, run_id, dump_toml(recipe), display).follow()


def _monitors(plan: "Plan") -> list[str]:
    return [spec.name for spec in plan.rewards if spec not in plan.scored]


def _side_by_side(before: str, after: str, path: Path) -> str:
    """The two grids in one picture; they show the same prompts and seeds."""
    from PIL import Image

    left, right = Image.open(before), Image.open(after)
    both = Image.new("RGB", (left.width + right.width, max(left.height, right.height)), "white")
    both.paste(left, (0, 0))
    both.paste(right, (left.width, 0))
    both.save(path)
    return str(path)


def text(figures: dict[str, Any]) -> str:
    """The summary, on one screen."""
    from headwater.cli.train import summary_text

    accuracy = figures["accuracy"]
    low, high = accuracy["difference"]["ci95"]
    verdict = (
        f"Held-out accuracy has {'risen' if figures['accuracy_rises'] else 'NOT risen'}: "
        f"{accuracy['before']['mean']:.3f} before, {accuracy['after']['mean']:.3f} after, "
        f"{accuracy['difference']['mean']:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
    )
    shown = {key: value for key, value in figures.items() if key not in ("accuracy", "accuracy_rises", "monitors")}
    shown |= {f"monitor {name}, change": one["mean"] for name, one in figures["monitors"].items()}
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
