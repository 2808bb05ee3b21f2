"""Watches the router beside a run: which weights each worker serves."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

from headwater.errors import duration
from headwater.router.v1.router_pb2 import GetStatusResponse, WatchStatusRequest
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.rpc.channel import sync_channel

INTERVAL_S = 0.2
_RETRY_S = 1.0


class RouterWatcher:
    """A thread that follows WatchStatus. Says when the router goes away and when it is back."""

    def __init__(self, router: str, say: Callable[[str], None]) -> None:
        self._router = router
        self._say = say
        self._stop = threading.Event()
        self._call: grpc.Call | None = None
        self.versions: dict[str, list[int]] = {}
        """Weight versions that each worker was seen with, in order, by worker id."""
        self._thread = threading.Thread(target=self._run, name="router-watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(3.0)

    def _run(self) -> None:
        lost = False
        while not self._stop.is_set():
            try:
                with sync_channel(self._router) as channel:
                    call = RouterServiceStub(channel).WatchStatus(WatchStatusRequest(interval=duration(INTERVAL_S)))
                    self._call = call
                    for response in call:
                        if lost:
                            self._say(f"the router at {self._router} is back")
                            lost = False
                        self._take(response.status)
            except grpc.RpcError:
                if not lost and not self._stop.is_set():
                    self._say(f"the router at {self._router} does not answer; progress stops until it is back")
                    lost = True
            self._stop.wait(_RETRY_S)

    def _take(self, status: GetStatusResponse) -> None:
        for worker in status.workers:
            seen = self.versions.setdefault(worker.worker_id, [])
            if (step := worker.report.weight_version.step) not in seen[-1:]:
                seen.append(step)
