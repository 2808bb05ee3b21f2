"""Start a run on the trainer and follow it to its end, through restarts of the trainer."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from headwater.cli.connect import connected
from headwater.cli.progress import Display
from headwater.errors import FailedPrecondition, HeadwaterError, Unavailable
from headwater.rpc.channel import sync_channel
from headwater.rpc.errors import from_rpc_error
from headwater.trainer.v1.trainer_pb2 import (
    GetRunRequest,
    Run,
    RunState,
    StartRunRequest,
    StopRunRequest,
    WatchRunRequest,
    WatchRunResponse,
)
from headwater.trainer.v1.trainer_pb2_grpc import TrainerServiceStub

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 10.0
RETRY_S = 1.0
ENDED = (RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_STOPPED, RunState.RUN_STATE_FAILED)


@dataclass
class RunHistory:
    """What the trainer has told of a run."""

    run: Run = field(default_factory=Run)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)

    def raise_if_failed(self) -> None:
        """Raise `FailedPrecondition` with the trainer's reason when the run failed."""
        if self.run.state == RunState.RUN_STATE_FAILED:
            raise FailedPrecondition(f"run {self.run.run_id} failed: {self.run.error}", reason="RUN_FAILED")


class RunFollower:
    """Starts one run and watches it; Ctrl-C asks the trainer to stop it after the current step."""

    def __init__(self, trainer: str, run_id: str, recipe_toml: str, display: Display) -> None:
        self._trainer = trainer
        self._request = StartRunRequest(run_id=run_id, recipe_toml=recipe_toml)
        self._display = display
        self._next_event = 0
        self.history = RunHistory()

    def follow(self) -> RunHistory:
        """Run it to the end. Raises what StartRun raises; a trainer that goes away is waited for."""
        with connected(self._trainer, "trainer") as channel:
            self.history.run.CopyFrom(TrainerServiceStub(channel).StartRun(self._request, timeout=START_TIMEOUT_S).run)
        self._display.step(self.history.run.step, self.history.run.total_steps, {})
        while self.history.run.state not in ENDED:
            try:
                self._watch()
            except KeyboardInterrupt:
                self._stop()
            except Unavailable:
                self._wait_for_trainer()
        return self.history

    def _watch(self) -> None:
        request = WatchRunRequest(run_id=self._request.run_id, from_event=self._next_event)
        with _calls(self._trainer) as stub:
            for event in stub.WatchRun(request):
                self._next_event = event.event_index + 1
                self._take(event)
            self.history.run.CopyFrom(stub.GetRun(GetRunRequest(run_id=self._request.run_id), timeout=10.0).run)

    def _take(self, event: WatchRunResponse) -> None:
        kind, history = event.WhichOneof("event"), self.history
        if kind == "metrics":
            step, values = event.metrics.step, dict(event.metrics.values)
            history.steps[step] = values
            history.run.step = step
            self._display.step(step, history.run.total_steps, values)
        elif kind == "notice":
            self._display.say(event.notice.message)
        elif kind == "checkpoint":
            history.checkpoints.append(event.checkpoint.path)
            self._display.say(f"checkpoint of step {event.checkpoint.step}: {event.checkpoint.path}")
        elif kind == "run":
            history.run.CopyFrom(event.run)

    def _stop(self) -> None:
        self._display.say("stopping after the current step; Ctrl-C again leaves the run to the trainer")
        with contextlib.suppress(Unavailable), _calls(self._trainer) as stub:
            stub.StopRun(StopRunRequest(run_id=self._request.run_id), timeout=CALL_TIMEOUT_S)

    def _wait_for_trainer(self) -> None:
        """Wait until the trainer answers; a restarted one is asked to resume the run from its last checkpoint."""
        self._display.say(
            f"the trainer at {self._trainer} does not answer; start it again with the command that `headwater up` "
            "printed. The run resumes from its last checkpoint. Ctrl-C gives up."
        )
        while not self._resume():
            time.sleep(RETRY_S)
        self._display.say("the trainer is back")

    def _resume(self) -> bool:
        try:
            with _calls(self._trainer) as stub:
                try:
                    run = stub.GetRun(GetRunRequest(run_id=self._request.run_id), timeout=CALL_TIMEOUT_S).run
                except grpc.RpcError as error:
                    if error.code() != grpc.StatusCode.NOT_FOUND:
                        raise
                    run = stub.StartRun(self._request, timeout=START_TIMEOUT_S).run
        except Unavailable:
            return False
        if run.started_at != self.history.run.started_at:  # another process, whose events count from 0
            self._next_event = 0
        self.history.run.CopyFrom(run)
        return True


@contextlib.contextmanager
def _calls(address: str) -> Iterator[TrainerServiceStub]:
    """A stub whose failures are our errors; a trainer that vanishes or is too slow is `Unavailable`."""
    with sync_channel(address) as channel:
        try:
            yield TrainerServiceStub(channel)
        except grpc.RpcError as error:
            ours: HeadwaterError = from_rpc_error(error)
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                ours = Unavailable(ours.message, reason=ours.reason)
            raise ours from error
