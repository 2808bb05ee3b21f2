"""Training: get groups → advantages → pairs → micro-batches → loss → step → update weights."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.config.recipe import Recipe
from headwater.tensors.codec import Fetch
from headwater_trainer.batch import assign_advantages, describe, load_batch
from headwater_trainer.checkpoint import TrainState
from headwater_trainer.groups import GroupBatch, GroupSource, Signal
from headwater_trainer.metrics import Accumulator
from headwater_trainer.model import Policy
from headwater_trainer.objectives import AnyObjective
from headwater_trainer.offending import Worst, dump
from headwater_trainer.optimizer import set_learning_rate
from headwater_trainer.pairs import PairBatch, TrainPair, micro_batches
from headwater_trainer.ranks import Ranks

Values = dict[str, float]
_SPIKE_MEMORY, _SPIKE_MINIMUM = 64, 16  # gradient norms whose median counts, and how many it takes at least


@dataclass
class Hooks:
    """What happens around the steps; called by all ranks together."""

    publish: Callable[[int], None] = lambda step: None  # send the weights as version `step`
    report: Callable[[int, Values], None] = lambda step, values: None
    watch: Callable[[int, Values], bool] = lambda step, values: False  # whether the run must end here
    save: Callable[[], None] = lambda: None  # write a checkpoint
    notice: Callable[[str, str], None] = lambda reason, message: None


@dataclass
class Trainer:
    """Everything that training needs, on one rank."""

    recipe: Recipe
    policy: Policy
    objective: AnyObjective
    optimizer: torch.optim.Optimizer
    source: GroupSource
    fetch: Fetch
    ranks: Ranks
    hooks: Hooks = field(default_factory=Hooks)
    state: TrainState = field(default_factory=TrainState)
    dump_folder: Path | None = None  # of the pairs of skipped updates


def train(t: Trainer) -> bool:
    """Train until all steps are done; False when stopped before. Raises `RunFailed`, on all ranks alike."""
    section, begins = t.recipe.train, True
    while t.state.step < section.steps:
        begun = time.monotonic()
        batch = t.source.take(t.state.step)
        if batch is Signal.STOP:
            return False
        if isinstance(batch, Signal):
            t.hooks.save()
            continue
        received = time.monotonic()
        set_learning_rate(t.optimizer, t.recipe.optimizer, t.state.step, section.steps)
        values = train_step(t, batch)
        if begins:
            t.objective.check_start(values)
            begins = False
        t.policy.update_old(t.state.updates)
        trained = time.monotonic()
        t.state.step += 1
        t.hooks.publish(t.state.step)
        t.source.trained(t.state.step)
        values |= _pace(values, begun, received, trained, time.monotonic())
        t.hooks.report(t.state.step, values)
        if t.hooks.watch(t.state.step, values):
            return False
        if section.checkpoint_every and t.state.step % section.checkpoint_every == 0 and t.state.step < section.steps:
            t.hooks.save()
    return True


def train_step(t: Trainer, received: GroupBatch) -> Values:
    """Train on the groups of one step; the figures of it. Groups that cannot be used are left out and reported."""

    def unusable(group_id: str, reason: str) -> None:
        t.source.fail(group_id, reason)
        t.hooks.notice("GROUP_UNUSABLE", f"group {group_id} is left out: {reason}")

    def pairs_of(group: ScoredGroup, indices: Sequence[int]) -> list[TrainPair]:
        return t.objective.pairs(group, indices, t.fetch, t.state.step)

    batch = load_batch(received.groups, t.recipe.train.updates_per_batch, pairs_of, t.ranks, unusable)
    values = dict(describe(batch.groups, received.dropped, t.state.step, t.recipe))
    values["groups/unusable"] = float(len(received.groups) - len(batch.groups))
    if not batch.groups:
        t.state.skipped += 1
        t.hooks.notice("STEP_SKIPPED", f"step {t.state.step + 1}: none of its groups could be used")
    else:
        assign_advantages(batch, t.recipe)
        for share in batch.shares:
            t.objective.prepare(t.policy, share, _micro_batches(t, share, batch.filler))
        values |= _merged([update(t, share, batch.filler) for share in batch.shares])
    return values | {"steps/skipped": float(t.state.skipped)}


def update(t: Trainer, pairs: list[TrainPair], filler: TrainPair | None) -> Values:
    """One optimizer update on the mean loss over the pairs of all ranks; skipped when it is not finite or spikes."""
    pair_count = t.ranks.total([float(len(pairs))])[0]
    figures, worst, size = Accumulator(), Worst(), t.recipe.train.micro_batch_size
    for position, micro in enumerate(_micro_batches(t, pairs, filler)):
        terms = t.objective.terms(t.policy, micro)
        # FSDP averages gradients over ranks; wanted is the sum over ranks, of a mean over the pairs of all ranks.
        ((terms.loss * micro.weight).sum() * (t.ranks.world_size / pair_count)).backward()
        figures.add(terms, micro.weight)
        worst.see(pairs[position * size : (position + 1) * size], terms.loss)
    grad_norm = _clip(t)
    values = _with_sample_size(figures.reduced(t.ranks)) | {"grad_norm": grad_norm, "pairs": pair_count}
    why = _objection(t, values["loss"], grad_norm)
    if not why:
        t.optimizer.step()
        t.state.updates += 1
        t.policy.updated(t.state.updates)
    else:
        t.state.skipped += 1
        t.hooks.notice(
            "STEP_SKIPPED",
            f"step {t.state.step + 1}: {why}; the weights are unchanged. "
            "If it repeats, lower optimizer.lr or look at the rewards",
        )
        if t.dump_folder is not None:
            dump(t.dump_folder, f"step_{t.state.step + 1:08d}_rank_{t.ranks.rank}", worst, values)
    t.optimizer.zero_grad(set_to_none=True)
    return values


def _objection(t: Trainer, loss: float, grad_norm: float) -> str:
    """Why an update must not be made, else ""; the same on all ranks. Keeps the norm for later comparisons."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return f"loss {loss}, gradient norm {grad_norm}"
    factor, norms = t.recipe.train.grad_spike_factor, t.state.grad_norms
    usual = statistics.median(norms) if len(norms) >= _SPIKE_MINIMUM else math.inf
    t.state.grad_norms = [*norms, grad_norm][-_SPIKE_MEMORY:]  # a spike as well: a new level is usual after a while
    if factor is not None and grad_norm > factor * usual:
        return (
            f"gradient norm {grad_norm:.3g} is above train.grad_spike_factor = {factor:g} times the median {usual:.3g}"
        )
    return ""


def _micro_batches(t: Trainer, pairs: list[TrainPair], filler: TrainPair | None) -> Iterable[PairBatch]:
    """As many micro-batches as the rank with the most pairs has."""
    size = t.recipe.train.micro_batch_size
    count = int(t.ranks.largest([math.ceil(len(pairs) / size)])[0])
    return micro_batches(pairs, size, count, filler, t.ranks.device, t.objective.stack)


def _clip(t: Trainer) -> float:
    """Scale the gradients down to max_grad_norm; their norm before, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(t.policy.trainable().values(), t.recipe.train.max_grad_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _with_sample_size(values: Values) -> Values:
    """With the effective sample size of the ratios as a share of the pairs, (sum ratio)^2 / (N sum ratio^2)."""
    square = values.pop("ratio/mean_square", 0.0)
    return values | ({"effective_sample_size": values["ratio/mean"] ** 2 / square} if square else {})


def _merged(updates: list[Values]) -> Values:
    """Figures of a step: averages over its updates, the sum of pairs, and the drift before any update."""
    merged = {name: sum(values[name] for values in updates) / len(updates) for name in updates[0]}
    merged["pairs"] *= len(updates)
    return merged | {name: updates[0][name] for name in updates[0] if name.startswith("log_prob_drift/")}


def _pace(values: Values, begun: float, received: float, trained: float, updated: float) -> Values:
    train_s = max(trained - received, 1e-9)
    return {
        "seconds/wait": received - begun,
        "seconds/train": trained - received,
        "seconds/update": updated - trained,
        "rate/images_per_s": values["images"] / max(updated - begun, 1e-9),
        "rate/pairs_per_s": values.get("pairs", 0.0) / train_s,
    }
