"""`headwater eval [RECIPE] --prompts FILE`: held-out evaluation with running services."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import options, output

if TYPE_CHECKING:
    from headwater.common.v1.reward_pb2 import RewardSpec
    from headwater.common.v1.sample_pb2 import WeightVersion
    from headwater.common.v1.sampling_pb2 import SamplingParams
    from headwater.config.recipe import Recipe
    from headwater.evaluation.plan import Plan


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "eval",
        help="evaluate the served weights on held-out prompts",
        description="Score deterministic (ODE) samples of held-out prompts, made by running services: means with 95 % "
        "confidence intervals, overall and per tag, a grid of pictures, and the difference to an earlier evaluation.",
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", type=Path, nargs="?", help="TOML file: sampling and rewards, unless given below")
    add("--prompts", metavar="FILE", type=Path, required=True, help="e.g. recipes/prompts/tiny_geneval_eval.jsonl")
    add("--rewards", metavar="NAMES", help="what is scored, e.g. tiny-geneval (default: the recipe's)")
    add("--monitors", metavar="NAMES", help="rewards to report beside it (default: the recipe's)")
    add("--samples-per-prompt", metavar="N", type=int, default=1, help="(default 1; more prompts tell more)")
    add("--seed", metavar="S", type=int, default=0, help="the same seed gives the same noise (default 0)")
    add("--limit", metavar="N", type=int, help="only the first N prompts")
    add("--steps", metavar="N", type=int, help="denoise steps (default: the recipe's, then 10)")
    add("--height", metavar="PX", type=int, help="in pixels (default: the recipe's, then 64)")
    add("--width", metavar="PX", type=int, help="in pixels (default: the recipe's, then 64)")
    add("--guidance-scale", metavar="G", type=float, help="1 means no guidance (default: the recipe's, then 1)")
    add("--negative-prompt", metavar="TEXT", help="used with guidance (default: the recipe's)")
    add("--out", metavar="DIR", type=Path, help="for results.json and grid.png (default runs/eval-TIME)")
    add("--min-version", metavar="RUN:STEP", help="oldest weights that may serve it")
    add("--baseline", metavar="RESULTS", type=Path, help="results.json of an earlier evaluation, or its folder")
    add("--pictures-per-tag", metavar="N", type=int, default=4, help="in the grid (default %(default)s)")
    add("--timeout", metavar="S", type=float, default=600.0, help="per prompt, in seconds (default %(default)s)")
    options.add_router(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate, compare, save, report."""
    from headwater.errors import InvalidArgument
    from headwater.evaluation.report import report

    plan = make_plan(args)
    folder = args.out or Path("runs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
    path = folder / "results.json"
    if args.baseline and path.resolve() in (args.baseline.resolve(), (args.baseline / "results.json").resolve()):
        raise InvalidArgument(f"--out {folder} holds the baseline itself; choose another folder", field="out")
    found = evaluate(args.router, plan, folder, args.baseline)
    print(report(found))
    pictures = f"; pictures: {found['grid']}" if found["grid"] else ""
    print(f"every sample: {found['results_file']}{pictures}")
    if args.json:
        output.print_json(found)
    return 0


def evaluate(router: str, plan: "Plan", folder: Path, baseline_path: Path | None = None) -> dict[str, Any]:
    """Run `plan` at `router`, compare it with an earlier evaluation, and leave results.json and grid.png in `folder`.

    Raises what `load_baseline`, `collect` and `compare` raise.
    """
    from headwater.cli.connect import connected
    from headwater.cli.eval_progress import Progress
    from headwater.evaluation import grid, results
    from headwater.evaluation.collect import collect
    from headwater.evaluation.report import versions

    baseline = results.load_baseline(baseline_path, plan) if baseline_path else None
    started = time.monotonic()
    with connected(router, "router") as channel, Progress(len(plan.items)) as progress:
        collected = collect(channel, plan, progress.update)
    found = results.figures(plan, collected)
    found["wall_time_s"] = round(time.monotonic() - started, 2)
    if baseline is not None:
        compared = results.compare(collected.records, baseline)
        notes = results.other_settings(baseline, plan)
        found["comparison"] = {"baseline": str(baseline_path), "notes": notes, **compared}
    folder.mkdir(parents=True, exist_ok=True)
    picture, title = folder / "grid.png", f"{plan.prompts_path.name}, {versions(found['weight_versions'])}"
    saved = grid.save_grid(collected.pictures, picture, title, plan.pictures_per_tag)
    results.save(folder / "results.json", found, collected.records)
    return found | {"results_file": str(folder / "results.json"), "grid": str(picture) if saved else None}


def make_plan(args: argparse.Namespace) -> "Plan":
    """The plan of a command line. Raises `InvalidArgument` and `NotFound` naming the option."""
    from headwater.config.prompts import load_prompts
    from headwater.config.recipe import PromptsSection
    from headwater.errors import InvalidArgument, NotFound
    from headwater.evaluation.plan import Plan

    if args.limit is not None and args.limit < 1:
        raise InvalidArgument(f"--limit is {args.limit}; it must be at least 1", field="limit")
    if not args.prompts.is_file():
        raise NotFound(f"--prompts: there is no file {args.prompts}", field="prompts")
    recipe = _recipe(args.recipe) if args.recipe else None
    return Plan(
        prompts_path=args.prompts,
        items=tuple(load_prompts(PromptsSection(path=str(args.prompts)))[: args.limit]),
        sampling=_sampling(args, recipe),
        rewards=_rewards(args, recipe),
        samples_per_prompt=args.samples_per_prompt,
        seed=args.seed,
        min_version=_version(args.min_version),
        timeout_s=args.timeout,
        pictures_per_tag=args.pictures_per_tag,
    )


def _recipe(path: Path) -> "Recipe":
    """The recipe; it need not name a model: the workers have one."""
    from headwater.config.load import load_table, recipe_from_table

    table = load_table(path)
    model = table.setdefault("model", {})
    if isinstance(model, dict):
        model.setdefault("path", "served")
    return recipe_from_table(table, source=str(path))


def _sampling(args: argparse.Namespace, recipe: "Recipe | None") -> "SamplingParams":
    from headwater.client import DEFAULT_SIDE_PX, DEFAULT_STEPS
    from headwater.common.v1.sampling_pb2 import SamplingParams

    side = DEFAULT_SIDE_PX
    params = SamplingParams(steps=DEFAULT_STEPS, height_px=side, width_px=side, guidance_scale=1.0)
    if recipe is not None:
        params = recipe.sampling.to_ode_proto()
    given: dict[str, Any] = {
        "steps": args.steps,
        "height_px": args.height,
        "width_px": args.width,
        "guidance_scale": args.guidance_scale,
        "negative_prompt": args.negative_prompt,
    }
    for name, value in given.items():
        if value is not None:
            _set(params, name, value)
    return params


def _set(params: "SamplingParams", name: str, value: Any) -> None:
    from headwater.errors import InvalidArgument

    try:
        setattr(params, name, value)
    except ValueError:  # what no field of the message can hold, e.g. a negative size
        raise InvalidArgument(f"sampling.{name} is {value}; it must be at least 1", field=f"sampling.{name}") from None


def _rewards(args: argparse.Namespace, recipe: "Recipe | None") -> "tuple[RewardSpec, ...]":
    """The rewards of the options; what they do not say is the recipe's."""
    from headwater.common.v1.reward_pb2 import RewardRole, RewardSpec

    of_recipe = [reward.to_proto() for reward in recipe.rewards] if recipe is not None else []
    monitor = RewardRole.REWARD_ROLE_MONITOR
    scored = [spec for spec in of_recipe if spec.role != monitor]
    watched = [spec for spec in of_recipe if spec.role == monitor]
    if args.rewards is not None:
        scored = [RewardSpec(name=name) for name in _names(args.rewards)]
        watched = [spec for spec in watched if spec.name not in _names(args.rewards)]
    if args.monitors is not None:
        watched = [RewardSpec(name=name, role=monitor) for name in _names(args.monitors)]
    for spec in scored:
        spec.ClearField("failure_policy")  # how a training run treats a failure is not how an evaluation does
    return (*scored, *watched)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _version(text: str | None) -> "WeightVersion | None":
    from headwater.common.v1.sample_pb2 import WeightVersion
    from headwater.errors import InvalidArgument

    if text is None:
        return None
    run_id, _, step = text.rpartition(":")
    if not run_id or not step.isdecimal():
        raise InvalidArgument(f"--min-version {text!r} is not RUN:STEP, e.g. quickstart:24", field="min_version")
    return WeightVersion(run_id=run_id, step=int(step))
