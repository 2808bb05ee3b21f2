"""A supervised run on all ranks: no router, no stream, no workers. Service, policy and checkpoints are those of RL."""

import logging
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwater.config.load import parse_recipe
from headwater.config.recipe import Recipe
from headwater.config.supervised import EmaSection
from headwater.diffusion import families
from headwater.diffusion.decay import ema_decay
from headwater.trainer.v1.trainer_pb2 import StartRunRequest
from headwater_trainer.checkpoint import Checkpoints, TrainState
from headwater_trainer.config import TrainerConfig
from headwater_trainer.cuda_graph import GraphedPass
from headwater_trainer.ema import Ema
from headwater_trainer.export import export_pipeline
from headwater_trainer.frontend import Frontend
from headwater_trainer.latents import LatentSet, cache_path, encode, load_set
from headwater_trainer.metrics import MetricsFile
from headwater_trainer.model import Policy, load_policy
from headwater_trainer.objectives.sft import BUCKETS, Sft, bucket_of, noisy
from headwater_trainer.optimizer import make_optimizer, set_learning_rate
from headwater_trainer.pictures import Pictures, save_grid
from headwater_trainer.ranks import Ranks
from headwater_trainer.service import check_model, run_folder

log = logging.getLogger(__name__)

_GO, _STOP, _SAVE = b"g", b"s", b"c"
_LATENTS, _SIGMA, _NOISE = "latents", "sigma", "noise"  # inputs of a pass beside the conditioning


class SupervisedRun:
    """The parts of a run with objective sft."""

    def __init__(
        self, request: StartRunRequest, config: TrainerConfig, ranks: Ranks, frontend: Frontend | None
    ) -> None:
        self._request, self._config, self._ranks, self._frontend = request, config, ranks, frontend
        self._recipe = recipe = parse_recipe(request.recipe_toml)
        self._folder = run_folder(recipe, request.run_id, config.output_dir)
        self._state = TrainState()
        self._order = _Order(0, recipe.run.seed)
        self._sums = torch.zeros(3, BUCKETS + 1, device=ranks.device)  # see _note

    def setup(self) -> None:
        """Encode the data or find it encoded, load, restore."""
        recipe, ranks = self._recipe, self._ranks
        assert recipe.data is not None
        torch.manual_seed(recipe.run.seed + ranks.rank)
        torch.use_deterministic_algorithms(recipe.run.deterministic)
        ranks.first_only("prepare the output folder", self._prepare_folder)
        family = check_model(recipe)
        codec = ranks.together("load the encoders", lambda: family.codec(recipe.model.path, ranks.device))
        path = cache_path(recipe, Path(recipe.data.cache_dir or self._config.output_dir / "cache"))
        begun = time.monotonic()
        ranks.first_only("encode the data", lambda: encode(recipe, codec, path))
        self._set: LatentSet = ranks.together("read the data", lambda: load_set(path)).to(ranks.device)
        self._order = _Order(len(self._set), recipe.run.seed)
        log.info("data pictures=%d cache=%s seconds=%.1f", len(self._set), path, time.monotonic() - begun)
        self._policy = ranks.together("load the model", lambda: load_policy(recipe, family, ranks))
        self._optimizer = make_optimizer(self._policy, recipe.optimizer)
        shift = float(families.scheduler_config(recipe.model.path).get("shift", 1.0))
        self._objective = Sft(recipe, shift)
        graphed = self._can_graph(recipe)
        self._graphed = GraphedPass(self._loss_of, list(self._policy.trainable().values())) if graphed else None
        self._ema = _make_ema(self._policy, recipe.ema) if recipe.ema else None
        self._pictures = Pictures(recipe, codec) if recipe.pictures.every else None
        self._checkpoints = Checkpoints(self._folder / "checkpoints", ranks, keep=recipe.train.keep_checkpoints)
        if (latest := self._checkpoints.latest()) is not None:
            self._state = self._checkpoints.load(latest, self._tensors(), self._optimizer)
            self._notice("RESUMED", f"continues from {latest} after step {self._state.step}")
        step = self._state.step
        self._metrics = MetricsFile(self._folder / "metrics.jsonl", resumed_step=step) if ranks.is_first else None
        self._reported_at = (step, time.monotonic())

    def train(self) -> bool:
        """Train until all steps are done; False when stopped before."""
        recipe = self._recipe
        while self._state.step < recipe.train.steps:
            signal = self._signal()
            if signal == _STOP:
                return False
            if signal == _SAVE:
                self.save()
            self._step()
            self._state.step += 1
            step, last = self._state.step, self._state.step == recipe.train.steps
            if step % recipe.train.report_every == 0 or last:
                self._report()
            if recipe.pictures.every and (step % recipe.pictures.every == 0 or last):
                self._draw()
            if recipe.train.checkpoint_every and step % recipe.train.checkpoint_every == 0 and not last:
                self.save()
            if (recipe.export.every and step % recipe.export.every == 0) or last:
                self._export()
        return True

    def save(self) -> None:
        """Write a checkpoint."""
        path = self._checkpoints.save(self._state, self._tensors(), self._optimizer, self._request.recipe_toml)
        if self._frontend is not None:
            self._frontend.record.add_checkpoint(self._state.step, str(path))

    def close(self) -> None:
        """Nothing is open."""

    def _step(self) -> None:
        """One optimizer update on the mean loss over the pictures of all ranks; skipped when it is not finite."""
        recipe, step = self._recipe, self._state.step
        assert recipe.data is not None
        self._rate = set_learning_rate(self._optimizer, recipe.optimizer, step, recipe.train.steps)
        index, dropped, sigma, noise = self._draws(recipe.data.batch_size, recipe.data.caption_dropout)
        loss_sum = torch.zeros((), device=self._ranks.device)
        parts = zip(
            *(each.split(recipe.train.micro_batch_size) for each in (index, dropped, sigma, noise)), strict=True
        )
        for some_index, some_dropped, some_sigma, some_noise in parts:
            latents, text = self._set.rows(some_index, some_dropped, self._ranks.device)
            inputs = {_LATENTS: latents, _SIGMA: some_sigma.to(latents.device), _NOISE: some_noise.to(latents.device)}
            losses = self._pass({**inputs, **text})
            loss_sum += losses.sum()
            self._note(losses, inputs[_SIGMA])
        norm = torch.nn.utils.clip_grad_norm_(self._policy.trainable().values(), recipe.train.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._sums[2, 0] += norm
        if math.isfinite(float(loss_sum + norm)):
            self._optimizer.step()
            self._state.updates += 1
            if self._ema is not None:
                self._ema.update(self._state.updates)
        else:
            self._state.skipped += 1
            self._notice("STEP_SKIPPED", f"step {step + 1}: the loss is not finite; the weights are unchanged")
        if self._graphed is None:
            self._optimizer.zero_grad(set_to_none=True)

    def _pass(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Forward and backward of a micro-batch; its losses fp32 [B]."""
        if self._graphed is not None:
            return self._graphed.run(inputs)
        loss, losses = self._loss_of(inputs)
        loss.backward()
        return losses

    def _loss_of(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the gradient is taken of, and the loss of each picture, fp32 [B]."""
        assert self._recipe.data is not None
        text = {name: tensor for name, tensor in inputs.items() if name not in (_LATENTS, _SIGMA, _NOISE)}
        batch = noisy(inputs[_LATENTS], inputs[_NOISE], inputs[_SIGMA], text)
        losses = self._objective.losses(self._policy, batch)
        # FSDP averages gradients over ranks; wanted is the mean over the pictures of all ranks.
        return losses.sum() * (self._ranks.world_size / self._recipe.data.batch_size), losses.detach()

    def _draws(self, batch_size: int, dropout: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """This rank's part of samples, dropped captions, sigmas and noise of the step, on the CPU.

        They follow from the run's seed and the step: the same on any number of ranks, and after a resume.
        """
        step, ranks = self._state.step, self._ranks
        generator = torch.Generator().manual_seed((self._recipe.run.seed << 32) + step)
        index = self._order.samples(step * batch_size, batch_size)
        dropped = torch.rand(batch_size, generator=generator) < dropout
        sigma = self._objective.draw_sigmas(batch_size, generator)
        noise = torch.randn(batch_size, *self._set.latents.shape[1:], generator=generator)
        begin, end = (batch_size * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
        return index[begin:end], dropped[begin:end], sigma[begin:end], noise[begin:end]

    def _note(self, losses: Tensor, sigma: Tensor) -> None:
        """Row 0: sum of losses by sigma bucket, and of all; row 1: their number; row 2: sum of gradient norms."""
        bucket = bucket_of(sigma)
        ones = torch.ones_like(losses)
        for where in (bucket, torch.full_like(bucket, BUCKETS)):
            self._sums[0].index_add_(0, where, losses)
            self._sums[1].index_add_(0, where, ones)

    def _report(self) -> None:
        sums = [self._ranks.total(row) for row in self._sums.tolist()]
        self._sums.zero_()
        step, (before, then), now = self._state.step, self._reported_at, time.monotonic()
        self._reported_at = (step, now)
        steps = max(1, step - before)
        means = [total / count if count else None for total, count in zip(sums[0], sums[1], strict=True)]
        named = {f"loss/sigma_{k / BUCKETS:g}_{(k + 1) / BUCKETS:g}": means[k] for k in range(BUCKETS)}
        values = {name: value for name, value in {"loss": means[BUCKETS], **named}.items() if value is not None}
        values |= {
            "grad_norm": sums[2][0] / steps / self._ranks.world_size,
            "lr": self._rate,
            "images": sums[1][BUCKETS],
            "rate/images_per_s": sums[1][BUCKETS] / max(now - then, 1e-9),
            "steps/skipped": float(self._state.skipped),
        }
        if self._frontend is None:
            return
        assert self._metrics is not None
        self._metrics.append(step, values)
        self._frontend.record.set_progress(step)
        self._frontend.record.add_metrics(step, values)
        log.info("step=%d loss=%.4f images/s=%.0f", step, values.get("loss", math.nan), values["rate/images_per_s"])

    def _draw(self) -> None:
        assert self._pictures is not None
        with self._averaged():
            pictures = self._pictures.draw(self._policy)
        path = self._folder / "pictures" / f"step_{self._state.step:08d}.png"
        self._ranks.first_only("save pictures", lambda: save_grid(pictures, path))

    def _export(self) -> None:
        recipe, policy = self._recipe, self._policy
        with self._averaged():
            weights = policy.all_weights()
        out = self._folder / "export" / f"step_{self._state.step:08d}"

        def write() -> None:
            out.parent.mkdir(parents=True, exist_ok=True)
            export_pipeline(recipe.model.path, out, policy.component, weights, recipe.export.dtype)
            self._notice("EXPORTED", f"the pipeline of step {self._state.step} is in {out}")

        self._ranks.first_only("export the pipeline", write)

    def _averaged(self) -> AbstractContextManager[None]:
        return self._ema.applied() if self._ema is not None else nullcontext()

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._policy.trainable(), **(self._ema.tensors() if self._ema is not None else {})}

    def _signal(self) -> bytes:
        if self._frontend is None:
            return self._ranks.broadcast()
        record = self._frontend.record
        return self._ranks.broadcast(_STOP if record.stop_requested else _SAVE if record.save_requested else _GO)

    def _can_graph(self, recipe: Recipe) -> bool:
        data, train = recipe.data, recipe.train
        one_pass = data is not None and train.micro_batch_size >= data.batch_size
        return train.cuda_graph and one_pass and self._ranks.device.type == "cuda" and self._ranks.world_size == 1

    def _prepare_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "recipe.toml").write_text(self._request.recipe_toml, encoding="utf-8")

    def _notice(self, reason: str, message: str) -> None:
        if self._frontend is not None:
            self._frontend.notice(reason, message)


def _make_ema(policy: Policy, section: EmaSection) -> Ema:
    return Ema(policy.trainable(), partial(ema_decay, max_decay=section.max_decay))


class _Order:
    """The samples of an endless run through `count` samples, in a new order at each pass."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._pass, self._permutation = -1, torch.zeros(0, dtype=torch.int64)

    def samples(self, position: int, count: int) -> Tensor:
        """int64 [count]: what is at `position` and after it; a function of seed and position."""
        parts: list[Tensor] = []
        while count:
            number, offset = divmod(position, self._count)
            if number != self._pass:
                generator = torch.Generator().manual_seed((self._seed << 32) + number)
                self._pass, self._permutation = number, torch.randperm(self._count, generator=generator)
            part = self._permutation[offset : offset + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return torch.cat(parts)
