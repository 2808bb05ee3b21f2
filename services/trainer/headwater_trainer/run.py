"""One run on all ranks: assemble, restore, train, finish."""

import logging
import shutil
import time

import torch

from headwater.config.load import parse_recipe
from headwater.config.prompts import load_prompts
from headwater.config.recipe import Recipe
from headwater.errors import HeadwaterError
from headwater.stream.scored import ScoredStream
from headwater.tensors.blobs import BlobStore
from headwater.trainer.v1.trainer_pb2 import RunState, StartRunRequest
from headwater_trainer.checkpoint import Checkpoints
from headwater_trainer.config import TrainerConfig
from headwater_trainer.feeder import Feeder
from headwater_trainer.frontend import Frontend
from headwater_trainer.groups import SharedSource, Signal
from headwater_trainer.hooks import load_hooks
from headwater_trainer.metrics import MetricsFile
from headwater_trainer.model import load_policy
from headwater_trainer.monitor_guard import MonitorGuard
from headwater_trainer.objectives import make_objective
from headwater_trainer.optimizer import make_optimizer
from headwater_trainer.prompt_order import PromptOrder
from headwater_trainer.ranks import Ranks, RunFailed
from headwater_trainer.service import check_model, run_folder
from headwater_trainer.stream_source import StreamSource
from headwater_trainer.supervised import SupervisedRun
from headwater_trainer.train import Hooks, Trainer, Values, train
from headwater_trainer.weight_sender import WeightSender

log = logging.getLogger(__name__)

_CATCH_UP_INTERVAL_S = 5.0  # how often late workers are looked for while there is nothing to do ...
_LONGEST_CATCH_UP_INTERVAL_S = 10.0  # ... and before an update when there always is something to do


def execute(request: StartRunRequest, config: TrainerConfig, ranks: Ranks, frontend: Frontend | None) -> None:
    """Execute a run to its end, on every rank. Raises `RunFailed` on all ranks alike, anything else on one."""
    recipe = parse_recipe(request.recipe_toml)
    run: SupervisedRun | _Run
    if recipe.supervised:
        run = SupervisedRun(request, config, ranks, frontend)
    else:
        run = _Run(request, recipe, config, ranks, frontend)
    try:
        run.setup()
        if frontend is not None:
            frontend.record.set_state(RunState.RUN_STATE_RUNNING)
        finished = run.train()
        run.save()
        if frontend is not None:
            frontend.record.set_state(RunState.RUN_STATE_SUCCEEDED if finished else RunState.RUN_STATE_STOPPED)
    finally:
        run.close()


class _Run:
    """The parts of a run, and what happens around its steps."""

    def __init__(
        self, request: StartRunRequest, recipe: Recipe, config: TrainerConfig, ranks: Ranks, frontend: Frontend | None
    ) -> None:
        self._request = request
        self._recipe = recipe
        self._config = config
        self._ranks = ranks
        self._frontend = frontend
        self._folder = run_folder(recipe, request.run_id, config.output_dir)
        self._source: StreamSource | None = None
        self._sender: WeightSender | None = None
        self._caught_up_at = time.monotonic()
        self._hooks = load_hooks(recipe.hooks, config.allow_hooks)
        monitors = [reward.name for reward in recipe.rewards if reward.role == "monitor"]
        section = recipe.monitor
        self._guard = MonitorGuard(monitors, window=section.window, deviations=section.deviations)

    def setup(self) -> None:
        """Load, restore, publish the present weights, and begin to read and feed."""
        recipe, ranks = self._recipe, self._ranks
        torch.manual_seed(recipe.run.seed + ranks.rank)
        torch.use_deterministic_algorithms(recipe.run.deterministic)
        ranks.first_only("prepare the output folder", self._prepare_folder)
        policy = ranks.together("load the model", lambda: load_policy(recipe, check_model(recipe), ranks))
        optimizer = make_optimizer(policy, recipe.optimizer)
        self._checkpoints = Checkpoints(self._folder / "checkpoints", ranks, keep=recipe.train.keep_checkpoints)
        store = ranks.together("open the blob store", lambda: BlobStore(self._config.blob_root))
        ranks.first_only("open stream and router", lambda: self._open(store))
        self.trainer = Trainer(
            recipe, policy, (self._hooks.objective or make_objective)(recipe), optimizer,
            SharedSource(self._source, ranks), store.get, ranks,
            Hooks(self._publish, self._report, self._watch, self.save, self._notice),
            dump_folder=self._folder / "skipped",
        )  # fmt: skip
        if (latest := self._checkpoints.latest()) is not None:
            self.trainer.state = self._checkpoints.load(latest, policy.tensors(), optimizer)
            self._notice("RESUMED", f"continues from {latest} after step {self.trainer.state.step}")
        state = self.trainer.state
        self._metrics = MetricsFile(self._folder / "metrics.jsonl", resumed_step=state.step) if ranks.is_first else None
        self._publish(state.step, everything=True)
        ranks.first_only("read the stream", lambda: self._start_source())

    def train(self) -> bool:
        """Train until all steps are done; False when stopped before."""
        return train(self.trainer)

    def _prepare_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "recipe.toml").write_text(self._request.recipe_toml, encoding="utf-8")
        free = shutil.disk_usage(self._folder).free
        log.info("run %s writes to %s (%.1f GB free)", self._request.run_id, self._folder, free / 1e9)

    def _open(self, store: BlobStore) -> None:
        assert self._frontend is not None
        recipe, config, run_id = self._recipe, self._config, self._request.run_id
        items = load_prompts(recipe.prompts)
        order = PromptOrder(items, seed=recipe.run.seed, shuffle=recipe.prompts.shuffle)
        stream = ScoredStream(config.redis, run_id, config.consumer)
        stream.open()
        feeder = Feeder(config.router, run_id, recipe, order, self._notice, steps=self._hooks.steps)
        component = check_model(recipe).components[0]
        self._sender = WeightSender(config.router, run_id, component, host=config.weight_host or None)
        self._source = StreamSource(
            recipe, run_id, stream, store, feeder, self._frontend.background,
            asked=self._asked, idle=self._idle, notice=self._notice, wait_limit_s=config.wait_limit_s,
            unwanted=self._hooks.filter,
        )  # fmt: skip

    def _start_source(self) -> None:
        assert self._source is not None
        self._source.start(self.trainer.state.step, self.trainer.state.cursor)

    def _asked(self) -> Signal | None:
        assert self._frontend is not None
        if self._frontend.record.stop_requested:
            return Signal.STOP
        return Signal.SAVE if self._frontend.record.save_requested else None

    def _publish(self, step: int, *, everything: bool = False) -> None:
        """Send the weights as version `step`: everything at the start, afterwards what training changes."""
        policy = self.trainer.policy
        weights = policy.all_weights() if everything else policy.changed_weights()

        def send() -> None:
            assert self._sender is not None
            assert self._frontend is not None
            if not everything and time.monotonic() - self._caught_up_at > _LONGEST_CATCH_UP_INTERVAL_S:
                self._catch_up()
            report = self._sender.publish(weights, step)
            for worker, why in report.lost.items():
                self._notice("WORKER_LOST", f"{worker} did not take the weights of step {step}: {why}")
            log.info(
                "weights step=%d workers=%s tensors=%d bytes=%d transport=%s seconds=%.2f",
                step, ",".join(report.updated) or "none", report.tensor_count, report.byte_count, report.transport,
                report.seconds,
            )  # fmt: skip
            self._frontend.record.set_progress(step, step)

        self._ranks.first_only(f"send the weights of step {step} to the workers", send)

    def _idle(self) -> None:
        if time.monotonic() - self._caught_up_at > _CATCH_UP_INTERVAL_S:
            self._catch_up()

    def _catch_up(self) -> None:
        """Bring late workers to the last published weights; a router that does not answer is waited for elsewhere."""
        assert self._sender is not None
        try:
            report = self._sender.catch_up()
        except HeadwaterError as error:
            log.warning("late workers are not served: %s", error.message)
        else:
            if report is not None:
                log.info("weights step=%d late workers=%s", report.step, ",".join(report.updated) or "none")
        self._caught_up_at = time.monotonic()

    def _report(self, step: int, values: Values) -> None:
        if self._frontend is None:
            return
        assert self._metrics is not None
        self._metrics.append(step, values)
        self._frontend.record.set_progress(step)
        self._frontend.record.add_metrics(step, values)
        shown = ("reward/mean", "loss", "grad_norm", "ratio/abs_deviation", "log_prob_drift/max", "staleness/max")
        log.info("step=%d %s", step, " ".join(f"{name}={values[name]:.4g}" for name in shown if name in values))

    def _watch(self, step: int, values: Values) -> bool:
        """Whether the run must end, because a monitor reward fell: it then has its last good weights back."""
        fall = self._guard.observe(step, values) if self._recipe.monitor.on_fall != "ignore" else None
        if fall is None:
            return False
        if self._recipe.monitor.on_fall == "warn":
            self._notice("MONITOR_FELL", fall.message)
            return False
        t, good = self.trainer, self._checkpoints.roll_back(fall.good_step)
        if good is not None:
            t.state = self._checkpoints.load(good, t.policy.tensors(), t.optimizer)
        told = f"rolled back to {good}" if good is not None else "there is no checkpoint to go back to"
        self._notice("MONITOR_FELL", f"{fall.message}; the run ends, {told}")
        return True

    def _notice(self, reason: str, message: str) -> None:
        if self._frontend is not None:
            self._frontend.notice(reason, message)

    def save(self) -> None:
        """Write a checkpoint, then acknowledge what it holds."""
        t = self.trainer
        t.state.cursor = t.source.cursor()
        path = self._checkpoints.save(t.state, t.policy.tensors(), t.optimizer, self._request.recipe_toml)
        self._ranks.first_only("acknowledge trained groups", t.source.settle)
        if self._frontend is not None:
            self._frontend.record.add_checkpoint(t.state.step, str(path))

    def close(self) -> None:
        """Stop feeding, close connections. Errors here are logged: the run has its outcome."""
        for part in (self._source, self._sender):
            try:
                if part is not None:
                    part.close()
            except (HeadwaterError, TimeoutError, RuntimeError) as error:
                log.warning("closing: %s", error)


def failure_of(error: Exception) -> str:
    """What a person is told of the error that ended a run."""
    if isinstance(error, RunFailed):
        return str(error)
    return getattr(error, "message", "") or f"{type(error).__name__}: {error}"
