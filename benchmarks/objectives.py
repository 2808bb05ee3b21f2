"""Which objective and which settings learn fastest on the model in the box: many short runs in one process.

    python benchmarks/objectives.py [SETTINGS.toml] [--seeds 2] [--images 2560] [--out FILE]

SETTINGS.toml (default: objectives.toml beside this file) holds `[[run]]` tables: a `name`, a `recipe` and `set`, a list
of overrides. Pairs, losses, optimizer, rewards and verification are the services' own; what is left out is their
traffic, so that a run takes seconds on a GPU. Every run starts from the same weights, sees the same number of images,
and is judged by strict accuracy on the held-out prompts: `lift` is the change, `before` and `after` the accuracies.
"""

import argparse
import json
import statistics
import time
import tomllib
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from headwater_reward.rewards.tiny_geneval import evaluate
from headwater_trainer.forward_pairs import ForwardPair, draw_steps, seed_of
from headwater_trainer.model import Policy, load_policy
from headwater_trainer.objectives import make_objective
from headwater_trainer.optimizer import make_optimizer, set_learning_rate
from headwater_trainer.prompt_order import PromptOrder
from headwater_trainer.ranks import Ranks, join
from headwater_trainer.train import Trainer, update
from headwater_trainer.transition_pairs import TransitionPair
from torch import Tensor

from headwater.config.load import load_recipe
from headwater.config.prompts import PromptItem, load_prompts
from headwater.config.recipe import PromptsSection, Recipe
from headwater.diffusion import families
from headwater.diffusion.advantages import AdvantageRule, combined_advantages
from headwater.diffusion.families.codec import Codec
from headwater.diffusion.schedules import Schedule, schedule
from headwater.diffusion.transitions import grid_transition
from headwater.sampling import resolve
from headwater.synthetic import Requirements

EVAL_PROMPTS = "recipes/prompts/tiny_geneval_eval.jsonl"
MICRO_BATCH = 512


def verified(job: tuple[Any, dict[str, Any]]) -> tuple[float, float]:
    """Strict and partial score of (picture, metadata)."""
    picture, metadata = job
    parts = list(evaluate(picture, Requirements.from_metadata(metadata)).values())
    return float(all(part == 1.0 for part in parts)), sum(parts) / len(parts)


@dataclass
class Sampled:
    """B pictures with what their sampling recorded."""

    latents: list[Tensor]  # T+1 of fp32 [B, ...], on the CPU
    log_probs: dict[int, Tensor]  # by stochastic step, fp32 [B]
    positive: dict[str, Tensor]
    strict: list[float]
    partial: list[float]


@dataclass(kw_only=True)
class Input:
    """A batch for the denoiser."""

    latent: Tensor
    timestep: Tensor
    positive: dict[str, Tensor]
    negative: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Sampler:
    """Draws pictures by the present policy and verifies them."""

    recipe: Recipe
    policy: Policy
    codec: Codec
    pool: Executor
    grid: Schedule
    shape: tuple[int, ...]

    @torch.no_grad()
    def draw(self, items: list[PromptItem], seed: int, stochastic: tuple[int, ...] = ()) -> Sampled:
        """One picture for each item; noise follows from `seed`."""
        device = self.policy.device
        generator = torch.Generator().manual_seed(seed)
        positive = self.codec.encode_text([item.text for item in items])
        now = torch.randn(len(items), *self.shape, generator=generator).to(device)
        latents, log_probs = [now], {}
        for step in range(self.recipe.sampling.steps):
            timestep = self.grid.timesteps[step].to(device).expand(len(items))
            velocity = self.policy.velocity(Input(latent=now, timestep=timestep, positive=positive))
            kind = self.recipe.sampling.transition if step in stochastic else "ode"
            move = grid_transition(
                kind, now, velocity, sigmas=self.grid.sigmas, step=step, noise_level=self.recipe.sampling.noise_level
            )
            now = move.mean
            if step in stochastic:
                now = move.sample_next(torch.randn(now.shape, generator=generator).to(device))
                log_probs[step] = move.log_prob(now).cpu()
            latents.append(now)
        jobs = zip(self.codec.decode(now).numpy(), (item.metadata for item in items), strict=True)
        scores = list(self.pool.map(verified, jobs, chunksize=16))
        strict, partial = ([score[index] for score in scores] for index in (0, 1))
        held = {name: tensor.cpu() for name, tensor in positive.items()}
        return Sampled([latent.cpu() for latent in latents], log_probs, held, strict, partial)

    def accuracy(self, items: list[PromptItem]) -> float:
        """Strict accuracy of the trained policy on `items`, at noise that is the same for every run."""
        return statistics.mean(self.draw(items, seed=12345).strict)


def pairs_of(recipe: Recipe, sampled: Sampled, grid: Schedule, step: int) -> list[Any]:
    """The pairs of every picture, as the services make them of stored trajectories."""
    found: list[Any] = []
    for index in range(len(sampled.strict)):
        common = {"group_id": str(index // recipe.train.group_size), "sample_index": index, "negative": {},
                  "positive": {name: tensor[index] for name, tensor in sampled.positive.items()}}  # fmt: skip
        if recipe.objective.stochastic:
            found += [
                TransitionPair(
                    step=at, latent=sampled.latents[at][index], next_latent=sampled.latents[at + 1][index],
                    timestep=grid.timesteps[at].item(), sigma=grid.sigmas[at].item(),
                    next_sigma=grid.sigmas[at + 1].item(), sigma_after_first=grid.sigmas[1].item(),
                    log_prob_engine=log_prob[index].item(), log_prob_old=log_prob[index].item(), **common,
                )
                for at, log_prob in sampled.log_probs.items()
            ]  # fmt: skip
            continue
        seed = seed_of(recipe.run.seed, step, index, "levels")
        for at in draw_steps(recipe.sampling.steps, recipe.levels_per_sample, seed):
            found.append(
                ForwardPair(
                    step=at, timestep=grid.timesteps[at].item(), sigma=grid.sigmas[at].item(),
                    x0=sampled.latents[-1][index], noise_seed=seed_of(recipe.run.seed, step, index, at), **common,
                )
            )  # fmt: skip
    return found


def train(recipe: Recipe, sampler: Sampler, ranks: Ranks, images: int) -> None:
    """Train `sampler.policy` on `images` pictures."""
    policy, section = sampler.policy, recipe.train
    objective, optimizer = make_objective(recipe), make_optimizer(policy, recipe.optimizer)
    t = Trainer(recipe, policy, objective, optimizer, source=None, fetch=None, ranks=ranks)  # type: ignore[arg-type]
    order = PromptOrder(load_prompts(recipe.prompts), seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
    batch = section.groups_per_step * section.group_size
    total = images // batch
    rule = AdvantageRule(std_normalization=recipe.objective.std_normalization, global_std=recipe.objective.global_std)
    for step in range(total):
        begin = step * section.groups_per_step
        items = [order.prompt(begin + index // section.group_size) for index in range(batch)]
        seed = seed_of(recipe.run.seed, step)
        stochastic = resolve(recipe.rollout_sampling(step), group_seed=seed).stochastic_steps
        sampled = sampler.draw(items, seed, stochastic)
        groups = [index // section.group_size for index in range(batch)]
        advantages = combined_advantages({"reward": sampled.partial}, {"reward": 1.0}, groups, rule)
        set_learning_rate(t.optimizer, recipe.optimizer, step, total)
        for part in range(section.updates_per_batch):
            pairs = pairs_of(recipe, sampled, sampler.grid, step)
            for pair in pairs:
                pair.advantage = float(advantages[pair.sample_index])
            taught = [pair for pair in pairs if pair.advantage and
                      int(pair.group_id) % section.updates_per_batch == part]  # fmt: skip
            if taught:
                update(t, taught, None)
        policy.update_old(t.state.updates)


def lift(recipe: Recipe, codec: Codec, pool: Executor, ranks: Ranks, images: int, judged: list[PromptItem]) -> Any:
    """Held-out accuracy before and after one run."""
    path = recipe.model.path
    family = families.resolve(path)
    policy = load_policy(recipe, family, ranks)
    grid = schedule(families.scheduler_config(path), recipe.sampling.steps)
    shape = family.latent_shape(path, recipe.sampling.height_px, recipe.sampling.width_px)
    sampler = Sampler(recipe, policy, codec, pool, grid, shape)
    before = sampler.accuracy(judged)
    begun = time.monotonic()
    train(recipe, sampler, ranks, images)
    seconds = time.monotonic() - begun
    return {"before": round(before, 4), "after": round(sampler.accuracy(judged), 4), "train_s": round(seconds, 1)}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", type=Path, nargs="?", default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--images", type=int, default=2560, help="that each run trains on")
    parser.add_argument("--per-prompt", type=int, default=4, help="pictures of each held-out prompt")
    parser.add_argument("--processes", type=int, default=2, help="that verify pictures")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no run after so many seconds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = tomllib.loads(arguments.settings.read_text(encoding="utf-8"))
    judged = [item for item in load_prompts(PromptsSection(path=EVAL_PROMPTS)) for _ in range(arguments.per_prompt)]
    begun = time.monotonic()
    with join() as ranks, ProcessPoolExecutor(arguments.processes) as pool:
        list(pool.map(abs, range(arguments.processes)))  # the processes start before CUDA does
        codec = None
        for seed in range(arguments.seeds):
            for run in settings["run"]:
                if time.monotonic() - begun > arguments.budget_s:
                    continue
                fixed = [f"run.seed={seed}", f"train.micro_batch_size={MICRO_BATCH}"]
                recipe = load_recipe(Path(run["recipe"]), [*fixed, *run.get("set", [])])
                codec = codec or families.resolve(recipe.model.path).codec(recipe.model.path, ranks.device)
                found = lift(recipe, codec, pool, ranks, run.get("images", arguments.images), judged)
                shown = {"name": run["name"], "seed": seed, "lift": round(found["after"] - found["before"], 4), **found}
                print(json.dumps(shown), flush=True)
                if arguments.out:
                    with arguments.out.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(shown) + "\n")


if __name__ == "__main__":
    main()
