"""TrainerService: checks recipes, starts and stops runs, tells what happens. Rank 0 serves it."""

import asyncio
import re
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from headwater.config.load import dump_toml, parse_recipe
from headwater.config.prompts import load_prompts
from headwater.config.recipe import Recipe
from headwater.diffusion import families
from headwater.diffusion.schedules import schedule
from headwater.errors import DeadlineExceeded, InvalidArgument
from headwater.sampling import resolve
from headwater.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headwater.trainer.v1.trainer_pb2 import Run, RunState
from headwater_trainer.hooks import load_hooks
from headwater_trainer.runs import RunBoard

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_SAVE_TIMEOUT_S = 600.0


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Serves TrainerService over a `RunBoard`."""

    def __init__(self, board: RunBoard, output_root: Path, allow_hooks: Collection[str] = ()) -> None:
        self._board = board
        self._output_root = output_root
        self._allow_hooks = allow_hooks

    async def StartRun(
        self, request: trainer_pb2.StartRunRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.StartRunResponse:
        """Check the recipe and start the run."""
        run = await asyncio.to_thread(check_request, request, self._output_root, self._allow_hooks)
        return trainer_pb2.StartRunResponse(run=self._board.start(request, run).run)

    async def StopRun(
        self, request: trainer_pb2.StopRunRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.StopRunResponse:
        """Ask the run to stop; the answer does not wait for it."""
        record = self._board.find(request.run_id)
        record.request_stop()
        return trainer_pb2.StopRunResponse(run=record.run)

    async def GetRun(
        self, request: trainer_pb2.GetRunRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.GetRunResponse:
        """The state of a run."""
        return trainer_pb2.GetRunResponse(run=self._board.find(request.run_id).run)

    async def WatchRun(
        self, request: trainer_pb2.WatchRunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[trainer_pb2.WatchRunResponse]:
        """Events from a position on, until the run ends."""
        async for event in self._board.find(request.run_id).follow(request.from_event):
            yield event

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.SaveCheckpointResponse:
        """Ask for a checkpoint and wait until it is durable."""
        timeout = request.timeout.ToTimedelta().total_seconds() if request.HasField("timeout") else _SAVE_TIMEOUT_S
        saver = self._board.find(request.run_id).request_save()
        try:
            saved = await asyncio.wait_for(asyncio.wrap_future(saver), timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no checkpoint of run {request.run_id!r} after {timeout:.0f} s: the step is still running; "
                "give a longer timeout"
            ) from None
        return trainer_pb2.SaveCheckpointResponse(checkpoint=saved)


def check_request(request: trainer_pb2.StartRunRequest, output_root: Path, allow_hooks: Collection[str] = ()) -> Run:
    """The run that a request asks for, not yet started. Raises `InvalidArgument` naming the field or recipe key."""
    if not _RUN_ID.fullmatch(request.run_id):
        raise InvalidArgument(
            f"run_id is {request.run_id[:100]!r}; it must be 1 to 64 letters, digits and ._- and start with a letter "
            "or digit",
            field="run_id",
        )
    recipe = parse_recipe(request.recipe_toml)
    check_model(recipe)
    load_prompts(recipe.prompts)
    load_hooks(recipe.hooks, allow_hooks)
    started = Timestamp()
    started.GetCurrentTime()
    return Run(
        run_id=request.run_id,
        state=RunState.RUN_STATE_STARTING,
        total_steps=recipe.train.steps,
        recipe_toml=dump_toml(recipe),
        output_dir=str(run_folder(recipe, request.run_id, output_root)),
        started_at=started,
    )


def check_model(recipe: Recipe) -> families.Family:
    """The model's family, after checking that it can make what the recipe samples. Raises `InvalidArgument`."""
    path = recipe.model.path
    try:
        family = families.resolve(path)
        schedule(families.scheduler_config(path), recipe.sampling.steps, recipe.sampling.flow_shift)
        multiple = family.size_multiple_px(path)
    except (ValueError, KeyError, OSError) as error:
        raise InvalidArgument(f"model.path: {error}", field="model.path", reason="MODEL_UNUSABLE") from error
    resolve(recipe.rollout_sampling(), group_seed=0, size_multiple_px=multiple)
    return family


def run_folder(recipe: Recipe, run_id: str, output_root: Path) -> Path:
    """Where a run keeps checkpoints and metrics: run.output_dir of the recipe, else a folder named after the run."""
    return Path(recipe.run.output_dir) if recipe.run.output_dir else output_root / run_id
