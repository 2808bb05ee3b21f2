"""Client side of one SubmitPrompts stream: a window of prompts in flight, refused ones again later, deadlines."""

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from headwater.common.v1.sample_pb2 import Sample
from headwater.errors import DeadlineExceeded, HeadwaterError, OutOfBudget, Unavailable, from_item_error
from headwater.rollout.v1.rollout_pb2 import GroupOutcome
from headwater.router.v1 import router_pb2 as pb

SLACK_S = 15.0
"""How much later than the router the client gives up on its own."""


@dataclass
class Entry:
    """A prompt in flight and the samples that have arrived for it."""

    prompt: pb.Prompt
    give_up_at: float
    """Monotonic time after which a refused prompt is not submitted again."""
    samples: list[Sample] = field(default_factory=list)
    outcome: GroupOutcome = field(default_factory=GroupOutcome)
    submit_at: float = 0.0


class Submission:
    """Submits prompts over one stream and yields their results as they finish."""

    def __init__(
        self,
        submit_prompts: Callable[[Iterator[pb.SubmitPromptsRequest]], Any],
        prompts: Iterator[pb.Prompt],
        *,
        max_in_flight: int,
        resubmit: bool,
    ) -> None:
        self._prompts = prompts
        self._max_in_flight = max_in_flight
        self._resubmit = resubmit
        self._running: dict[str, Entry] = {}
        self._refused: list[Entry] = []
        self._outgoing: queue.SimpleQueue[pb.SubmitPromptsRequest | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[pb.SubmitPromptsResponse | grpc.RpcError | None] = queue.SimpleQueue()
        self._call = submit_prompts(iter(self._outgoing.get, None))

    def results(self) -> Iterator[tuple[pb.Prompt, Entry | HeadwaterError]]:
        """(prompt, finished entry or error), in order of finish. Raises `grpc.RpcError` when the stream breaks.

        Closing the iterator early cancels the call and with it every prompt that is still running.
        """
        threading.Thread(target=self._receive, name="headwater-client", daemon=True).start()
        try:
            while self._fill():
                event = self._next_event()
                if event is not None and (result := self._handle(event)) is not None:
                    yield result
            self._outgoing.put(None)
            self._drain()
        finally:
            self._outgoing.put(None)
            self._call.cancel()  # no effect on a call that has ended

    def _receive(self) -> None:
        try:
            for event in self._call:
                self._incoming.put(event)
            self._incoming.put(None)
        except grpc.RpcError as error:
            self._incoming.put(error)

    def _fill(self) -> bool:
        """Submit what the window allows; returns whether there is anything left to wait for."""
        now = time.monotonic()
        for entry in [entry for entry in self._refused if entry.submit_at <= now]:
            self._refused.remove(entry)
            self._submit(entry)
        while len(self._running) + len(self._refused) < self._max_in_flight:
            prompt = next(self._prompts, None)
            if prompt is None:
                break
            prompt.request_id = prompt.request_id or uuid.uuid4().hex
            self._submit(Entry(prompt, time.monotonic() + _timeout_s(prompt)))
        return bool(self._running or self._refused)

    def _submit(self, entry: Entry) -> None:
        self._running[entry.prompt.request_id] = entry
        self._outgoing.put(pb.SubmitPromptsRequest(prompt=entry.prompt))

    def _next_event(self) -> pb.SubmitPromptsResponse | None:
        """The next event, or None when it is time to submit a refused prompt again."""
        limit_s = max((_timeout_s(entry.prompt) for entry in self._running.values()), default=0.0) + SLACK_S
        due_s = min((entry.submit_at for entry in self._refused), default=float("inf")) - time.monotonic()
        try:
            event = self._incoming.get(timeout=max(0.0, min(limit_s, due_s)))
        except queue.Empty:
            if due_s <= limit_s:
                return None
            raise DeadlineExceeded(f"no word from the router for {limit_s:.0f} s") from None
        if isinstance(event, grpc.RpcError):
            raise event
        if event is None:
            raise Unavailable("the router ended the stream before all prompts had ended", reason="STREAM_ENDED")
        return event

    def _handle(self, event: pb.SubmitPromptsResponse) -> tuple[pb.Prompt, Entry | HeadwaterError] | None:
        entry = self._running.get(event.request_id)
        kind = event.WhichOneof("event")
        if entry is None or kind is None or kind == "accepted":
            return None
        if kind == "sample":
            entry.samples.append(event.sample)
            return None
        del self._running[event.request_id]
        if kind == "outcome":
            entry.outcome = event.outcome
            return entry.prompt, entry
        error = from_item_error(event.error)
        retry_after_s = error.retry_after_s if isinstance(error, OutOfBudget) else None
        if self._resubmit and retry_after_s is not None and time.monotonic() < entry.give_up_at:
            entry.submit_at = time.monotonic() + retry_after_s
            self._refused.append(entry)
            return None
        return entry.prompt, error

    def _drain(self) -> None:
        """After the last result: let the stream end by itself, for a moment."""
        with contextlib.suppress(queue.Empty):
            while isinstance(self._incoming.get(timeout=1.0), pb.SubmitPromptsResponse):
                pass


def _timeout_s(prompt: pb.Prompt) -> float:
    return prompt.timeout.ToTimedelta().total_seconds()
