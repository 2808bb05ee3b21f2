"""The process of each rank: rank 0 serves clients and decides, the others follow."""

import logging
import os
import signal
import time
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.rpc import credentials
from headwater.rpc.server import Server
from headwater.telemetry import setup_logging
from headwater.telemetry.metrics import serve_metrics
from headwater.trainer.v1.trainer_pb2 import RunState, StartRunRequest
from headwater.trainer.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from headwater_trainer.background import BackgroundLoop
from headwater_trainer.config import TrainerConfig
from headwater_trainer.frontend import Frontend
from headwater_trainer.ranks import Ranks, RunFailed, join, restarts_left
from headwater_trainer.run import execute, failure_of
from headwater_trainer.runs import RunBoard
from headwater_trainer.service import TrainerServicer, check_request

log = logging.getLogger(__name__)

_IDLE, _RUN, _LEAVE = b"i", b"r", b"x"
_IDLE_INTERVAL_S = 5.0  # how often waiting ranks hear that rank 0 is alive
_FAREWELL_S = 1.0  # for clients to receive the last event before the process ends


def run_trainer(config: TrainerConfig) -> int:
    """Run this rank until it is told to leave; the exit status."""
    setup_logging(f"trainer{os.environ.get('RANK', '0')}")
    with join(config.device, config.collective_timeout_s) as ranks:
        try:
            credentials.use(config.security)
            return _lead(config, ranks) if ranks.is_first else _follow(config, ranks)
        except HeadwaterError as error:
            log.error("%s", error.message)
            return 2


def _follow(config: TrainerConfig, ranks: Ranks) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when to leave
        signal.signal(number, signal.SIG_IGN)
    while True:
        command = ranks.broadcast()
        if command[:1] == _LEAVE:
            return 0
        if command[:1] == _RUN:
            _attempt(StartRunRequest.FromString(command[1:]), config, ranks, None)


def _lead(config: TrainerConfig, ranks: Ranks) -> int:
    config.output_dir.mkdir(parents=True, exist_ok=True)
    board, background, active = RunBoard(), BackgroundLoop("grpc"), ActiveRun(config.output_dir)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: board.close())
    server = background.call(_serve(config, board), 30.0)
    serve_metrics(config.metrics_bind, board.figures)
    _continue_interrupted(board, active, config)
    try:
        while not board.closing:
            request = board.take_request(_IDLE_INTERVAL_S)
            if request is None:
                ranks.broadcast(_IDLE)
                continue
            ranks.broadcast(_RUN + request.SerializeToString())
            active.set(request)
            _attempt(request, config, ranks, Frontend(board.find(request.run_id), background))
            if not board.closing:
                active.clear()
        ranks.broadcast(_LEAVE)
    finally:
        time.sleep(_FAREWELL_S)
        background.call(server.stop(1.0), 10.0)
        background.close()
    return 0


async def _serve(config: TrainerConfig, board: RunBoard) -> Server:
    """A serving server of the loop that this runs in."""
    server = Server(config.bind, name="trainer", insecure=config.insecure)
    servicer = TrainerServicer(board, config.output_dir, config.allow_hooks)
    server.add(add_TrainerServiceServicer_to_server, servicer, "headwater.trainer.v1.TrainerService")
    await server.start()
    await server.set_serving(True)
    return server


def _attempt(request: StartRunRequest, config: TrainerConfig, ranks: Ranks, frontend: Frontend | None) -> None:
    """Execute a run; a failure that all ranks share ends the run, any other the process as well.

    The run has not failed when torchrun starts the ranks again: they continue it.
    """
    try:
        execute(request, config, ranks, frontend)
    except Exception as error:  # the edge of the process: whatever it is, clients must hear of it
        log.error("run %s failed: %s", request.run_id, failure_of(error), exc_info=not isinstance(error, RunFailed))
        ends_process = not isinstance(error, RunFailed) and ranks.world_size > 1
        if frontend is not None and not (ends_process and restarts_left()):
            frontend.record.set_state(RunState.RUN_STATE_FAILED, failure_of(error))
        if ends_process:
            raise


class ActiveRun:
    """The run that this trainer is executing, on disk: a process that was killed continues it when it is back."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / "active_run.bin"

    def set(self, request: StartRunRequest) -> None:
        """Note the run."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(request.SerializeToString())
        os.replace(temporary, self._path)

    def get(self) -> StartRunRequest | None:
        """The run that was interrupted, if any."""
        return StartRunRequest.FromString(self._path.read_bytes()) if self._path.exists() else None

    def clear(self) -> None:
        """The run has ended."""
        self._path.unlink(missing_ok=True)


def _continue_interrupted(board: RunBoard, active: ActiveRun, config: TrainerConfig) -> None:
    request = active.get()
    if request is None:
        return
    log.warning("run %s was interrupted and is continued; StopRun ends it", request.run_id)
    try:
        board.start(request, check_request(request, config.output_dir, config.allow_hooks))
    except HeadwaterError as error:
        log.error("run %s cannot be continued: %s", request.run_id, error.message)
        active.clear()
