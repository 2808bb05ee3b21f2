"""The runs of this process: their state and their events. Written by the training thread, read by the gRPC server."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future

from google.protobuf.timestamp_pb2 import Timestamp

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import FailedPrecondition, NotFound
from headwater.telemetry.metrics import Figure
from headwater.trainer.v1.trainer_pb2 import (
    CheckpointSaved,
    Notice,
    Run,
    RunState,
    StartRunRequest,
    StepMetrics,
    WatchRunResponse,
)

ENDED = (RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_STOPPED, RunState.RUN_STATE_FAILED)


class RunRecord:
    """One run: its state, its event log, and what clients have asked of it. All methods are thread-safe."""

    def __init__(self, run: Run) -> None:
        self._lock = threading.RLock()  # a state and its event change together
        self._run = Run()
        self._run.CopyFrom(run)
        self._events: list[WatchRunResponse] = []
        self._watchers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._savers: list[Future[CheckpointSaved]] = []
        self._stop = False
        self.last_metrics: Mapping[str, float] = {}
        self._append(run=run)

    @property
    def run(self) -> Run:
        """A copy of the present state."""
        copy = Run()
        with self._lock:
            copy.CopyFrom(self._run)
        return copy

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.run.state in ENDED

    def set_state(self, state: "RunState.ValueType", error: str = "") -> None:
        """Change the state; watchers see it. An ended run stays as it ended."""
        with self._lock:
            if self._run.state in ENDED:
                return
            self._run.state, self._run.error = state, error
            savers, self._savers = (self._savers, []) if state in ENDED else ([], self._savers)
            self._append(run=self.run)
        for saver in savers:
            saver.set_exception(FailedPrecondition("the run has ended", reason="RUN_ENDED"))

    def set_output_dir(self, path: str) -> None:
        """Note where checkpoints and metrics go."""
        with self._lock:
            self._run.output_dir = path

    def set_progress(self, step: int, version: int | None = None) -> None:
        """Note the steps done and, when given, the weight version that the workers serve."""
        with self._lock:
            self._run.step = step
            if version is not None:
                self._run.weight_version.CopyFrom(WeightVersion(run_id=self._run.run_id, step=version))

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Tell the figures of a step; those that are not finite are left out of the event."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.last_metrics = finite
        self._append(metrics=StepMetrics(step=step, values=finite))

    def notice(self, reason: str, message: str) -> None:
        """Tell a person something."""
        self._append(notice=Notice(reason=reason, message=message))

    def add_checkpoint(self, step: int, path: str) -> None:
        """Tell of a durable checkpoint, to watchers and to those who asked for it."""
        saved = CheckpointSaved(step=step, path=path)
        with self._lock:
            savers, self._savers = self._savers, []
        for saver in savers:
            saver.set_result(saved)
        self._append(checkpoint=saved)

    def request_stop(self) -> None:
        """Ask for a stop after the current step."""
        self._stop = True

    @property
    def stop_requested(self) -> bool:
        """Whether somebody asked for a stop."""
        return self._stop

    def request_save(self) -> "Future[CheckpointSaved]":
        """Ask for a checkpoint after the current step. Raises `FailedPrecondition` when the run has ended."""
        saver: Future[CheckpointSaved] = Future()
        with self._lock:
            if self._run.state in ENDED:
                raise FailedPrecondition(f"run {self._run.run_id!r} has ended", reason="RUN_ENDED")
            self._savers.append(saver)
        return saver

    @property
    def save_requested(self) -> bool:
        """Whether somebody waits for a checkpoint."""
        with self._lock:
            return bool(self._savers)

    async def follow(self, first: int) -> AsyncIterator[WatchRunResponse]:
        """Every event from position `first` on, past ones first; ends with the run."""
        watcher = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._watchers.add(watcher)
        try:
            while True:
                watcher[1].clear()
                with self._lock:
                    events, over = self._events[first:], self.ended
                for event in events:
                    yield event
                first += len(events)
                if over:
                    return
                await watcher[1].wait()
        finally:
            with self._lock:
                self._watchers.discard(watcher)

    def _append(self, **event: object) -> None:
        now = Timestamp()
        now.GetCurrentTime()
        with self._lock:
            self._events.append(WatchRunResponse(event_index=len(self._events), time=now, **event))  # type: ignore[arg-type]
            watchers = list(self._watchers)
        for loop, changed in watchers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)


class RunBoard:
    """All runs of this process, and the request to start the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, RunRecord] = {}
        self._last: RunRecord | None = None
        self._next: StartRunRequest | None = None
        self._changed = threading.Event()
        self.closing = False

    def start(self, request: StartRunRequest, run: Run) -> RunRecord:
        """Put a checked run on the board; the active run again changes nothing.

        Raises `FailedPrecondition` while another run is active.
        """
        with self._lock:
            active = self._last
            if active is not None and not active.ended:
                if active.run.run_id == request.run_id:
                    return active
                raise FailedPrecondition(
                    f"run {active.run.run_id!r} is active; wait for it, or stop it with StopRun", reason="RUN_ACTIVE"
                )
            record = RunRecord(run)
            self._records[request.run_id] = self._last = record
            self._next = request
            self._changed.set()
            return record

    def find(self, run_id: str) -> RunRecord:
        """A run by id; the active or last one for an empty id. Raises `NotFound`."""
        with self._lock:
            record = self._records.get(run_id) if run_id else self._last
            if record is not None:
                return record
            known = ", ".join(sorted(self._records)) or "none yet"
        raise NotFound(f"no run {run_id!r} in this trainer process; known: {known}", reason="RUN_UNKNOWN")

    def figures(self) -> Iterator[Figure]:
        """The active or last run, for Prometheus: its state and every figure of its last step (docs/metrics.md)."""
        record = self._last
        if record is None:
            return
        run, own = record.run, {"run_id": record.run.run_id}
        state = RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
        yield Figure("headwater_trainer_run_state", "1 for the state of the run", 1, {**own, "state": state})
        yield Figure("headwater_trainer_step", "Steps done", run.step, own)
        yield Figure("headwater_trainer_total_steps", "Steps of the run", run.total_steps, own)
        yield Figure("headwater_trainer_weight_step", "Step of the weights sent last", run.weight_version.step, own)
        for name, value in record.last_metrics.items():
            yield Figure("headwater_trainer_metric", "A figure of the last step", value, {**own, "name": name})

    def take_request(self, timeout_s: float) -> StartRunRequest | None:
        """The run to execute next, or None after `timeout_s`, or at once when closing."""
        self._changed.wait(timeout_s)
        with self._lock:
            self._changed.clear()
            request, self._next = self._next, None
            return request

    def close(self) -> None:
        """Stop the active run after its current step and take no other."""
        self.closing = True
        with self._lock:
            if self._last is not None:
                self._last.request_stop()
        self._changed.set()
