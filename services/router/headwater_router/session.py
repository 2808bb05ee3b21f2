"""One SubmitPrompts stream: prompts come in, their events go out as they happen."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from headwater.errors import Cancelled, HeadwaterError, to_item_error
from headwater.router.v1.router_pb2 import PromptAccepted, SubmitPromptsRequest, SubmitPromptsResponse
from headwater_router.attempts import Group
from headwater_router.live import Live, draining_error
from headwater_router.prompts import Prompts

log = logging.getLogger(__name__)

MAX_UNSENT = 256
"""Events that may wait for a slow reader; beyond it no further prompt of the stream is read: memory is bounded."""


class Session:
    """The prompts of one stream. `events` ends when all input was read and all prompts have ended."""

    def __init__(self, prompts: Prompts, requests: AsyncIterator[SubmitPromptsRequest]) -> None:
        self._prompts = prompts
        self._requests = requests
        self._outbox: asyncio.Queue[SubmitPromptsResponse | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._live: set[Live] = set()
        self._input_ended = self._cut_off = False

    async def events(self) -> AsyncGenerator[SubmitPromptsResponse, None]:
        """Read prompts and yield events; closing it early cancels every prompt of the stream."""
        reader = asyncio.ensure_future(self._read())
        try:
            while (event := await self._outbox.get()) is not None:
                if self._outbox.qsize() < MAX_UNSENT:
                    self._room.set()
                yield event
            if reader.done() and not reader.cancelled() and (error := reader.exception()):
                raise error
            if self._cut_off:
                raise draining_error()
        finally:
            reader.cancel()
            for live in list(self._live):
                live.stop(Cancelled("the client's stream ended before the prompt did", reason="STREAM_ENDED"))

    async def _read(self) -> None:
        """Admit prompts until the client half-closes or the router drains."""
        draining = asyncio.ensure_future(self._prompts.draining.wait())
        submitting = asyncio.ensure_future(self._submit_all())
        try:
            await asyncio.wait({draining, submitting}, return_when=asyncio.FIRST_COMPLETED)
            if submitting.done():
                submitting.result()
            else:
                self._cut_off = True
        finally:
            draining.cancel()
            submitting.cancel()
            self._input_ended = True
            self._finish_if_done()

    async def _submit_all(self) -> None:
        try:
            async for request in self._requests:
                await self._room.wait()
                self._submit(request)
        except grpc.aio.AioRpcError as error:  # the peer is gone; `events` is closed with the call
            log.debug("a client's stream broke: %s", error.code())

    def _submit(self, request: SubmitPromptsRequest) -> None:
        request_id = request.prompt.request_id
        try:
            live = self._prompts.start(request.prompt)
        except HeadwaterError as error:
            self._put(SubmitPromptsResponse(request_id=request_id, error=to_item_error(error)))
            return
        self._live.add(live)
        accepted = PromptAccepted(group_id=live.request.group_id, queue_position=live.queue_position)
        self._put(SubmitPromptsResponse(request_id=live.request_id, accepted=accepted))
        live.task.add_done_callback(lambda _: self._deliver(live))

    def _deliver(self, live: Live) -> None:
        self._live.discard(live)
        result = live.result()
        if isinstance(result, Group):
            for sample in result.samples:
                self._put(SubmitPromptsResponse(request_id=live.request_id, sample=sample))
            self._put(SubmitPromptsResponse(request_id=live.request_id, outcome=result.outcome))
        else:
            self._put(SubmitPromptsResponse(request_id=live.request_id, error=to_item_error(result)))
        self._finish_if_done()

    def _put(self, event: SubmitPromptsResponse) -> None:
        self._outbox.put_nowait(event)
        if self._outbox.qsize() >= MAX_UNSENT:
            self._room.clear()

    def _finish_if_done(self) -> None:
        if self._input_ended and not self._live:
            self._outbox.put_nowait(None)
