"""What the dashboard knows: the router asked at each view, the trainer's events followed in the background."""

import asyncio
from typing import Any

import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message

from headwater.router.v1.router_pb2 import GetStatusRequest
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater.trainer.v1.trainer_pb2 import GetRunRequest, WatchRunRequest, WatchRunResponse
from headwater.trainer.v1.trainer_pb2_grpc import TrainerServiceStub

CALL_TIMEOUT_S = 2.0
WATCH_TIMEOUT_S = 3600.0  # then the stream is opened anew
RETRY_S = 1.0
NOTICES_KEPT = 20
REWARD = "reward/mean"


class Sources:
    """Clients of the router and the trainer. Create, `follow_runs` and `close` on one event loop."""

    def __init__(self, router: str, trainer: str) -> None:
        self._addresses = {"router": router, "trainer": trainer}
        self._channels = {name: aio_channel(address) for name, address in self._addresses.items()}
        self._router = RouterServiceStub(self._channels["router"])
        self._trainer = TrainerServiceStub(self._channels["trainer"])
        self._run_id = ""
        self._steps: dict[int, dict[str, float]] = {}
        self._notices: list[dict[str, Any]] = []

    async def snapshot(self) -> dict[str, Any]:
        """Everything to show, ready for JSON. A service that does not answer has `ok` false and an `error`."""
        router, trainer = await asyncio.gather(
            self._ask("router", self._router.GetStatus(GetStatusRequest(), timeout=CALL_TIMEOUT_S)),
            self._ask("trainer", self._trainer.GetRun(GetRunRequest(), timeout=CALL_TIMEOUT_S)),
        )
        steps = [{"step": step, **values} for step, values in sorted(self._steps.items())]
        return {
            "router": router,
            "trainer": {**trainer, "run_id": self._run_id, "steps": steps, "notices": self._notices},
        }

    async def _ask(self, name: str, call: Any) -> dict[str, Any]:
        answer = {"ok": True, "address": self._addresses[name], "error": "", "reply": {}}
        try:
            answer["reply"] = _to_dict(await call)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:  # not found: a trainer that waits for its first run
                why = f"{error.code().name}: {from_rpc_error(error).message}"
                remedy = f"start headwater-{name} or give its address with --{name}"
                answer |= {"ok": False, "error": f"{answer['address']} does not answer ({why}); {remedy}"}
        return answer

    async def follow_runs(self) -> None:
        """Collect the events of the active or last run, for ever; a new run replaces the old one."""
        while True:
            try:
                # From the first event each time: steps are keyed by number, so reading them twice changes nothing.
                async for event in self._trainer.WatchRun(WatchRunRequest(), timeout=WATCH_TIMEOUT_S):
                    self._take(event)
            except grpc.aio.AioRpcError:
                pass  # `snapshot` asks too, and shows why the trainer does not answer
            await asyncio.sleep(RETRY_S)

    def _take(self, event: WatchRunResponse) -> None:
        if event.event_index == 0:
            self._notices = []
        if event.HasField("run") and event.run.run_id != self._run_id:
            self._run_id, self._steps, self._notices = event.run.run_id, {}, []
        elif event.HasField("metrics"):
            self._steps[event.metrics.step] = dict(event.metrics.values)
        elif event.HasField("notice"):
            self._notices = [*self._notices, _to_dict(event)][-NOTICES_KEPT:]

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close(None)


def curve(steps: list[dict[str, Any]], width: float, height: float) -> str:
    """Points of an SVG polyline of the reward by step; empty below two steps."""
    points = [(row["step"], row[REWARD]) for row in steps if REWARD in row]
    if len(points) < 2:
        return ""
    (x0, x1), values = (points[0][0], points[-1][0]), [value for _, value in points]
    low, span = min(values), (max(values) - min(values)) or 1.0
    return " ".join(f"{(x - x0) / (x1 - x0) * width:.1f},{height - (y - low) / span * height:.1f}" for x, y in points)


def _to_dict(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
