"""Which worker gets which prompt: fairness, load, weights and limits."""

import pytest
from headwater_router.dispatch import Dispatcher, Ticket
from headwater_router.registry import Registry

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import Unavailable
from headwater.rollout.v1.rollout_pb2 import GetWorkerInfoResponse, WorkerState
from headwater.router.v1.router_pb2 import RegisterWorkerRequest, WorkerReport


@pytest.fixture
def registry():
    return Registry(expiry_s=5)


@pytest.fixture
def dispatcher(registry):
    dispatcher = Dispatcher(registry)
    registry.on_change = dispatcher.pump
    return dispatcher


def report(step=0, run_id="run"):
    return WorkerReport(state=WorkerState.WORKER_STATE_READY, weight_version=WeightVersion(run_id=run_id, step=step))


def add(registry, worker_id, capacity=1, step=0, **info):
    return registry.register(
        RegisterWorkerRequest(
            worker_id=worker_id,
            address="127.0.0.1:1",
            capacity_groups=capacity,
            report=report(step),
            info=GetWorkerInfoResponse(**info),
        )
    )


def enqueue(dispatcher, number, **needs):
    ticket = Ticket(number=number, **needs)
    dispatcher.enqueue(ticket)
    return ticket


def worker_of(ticket):
    return ticket.assigned.result().worker_id if ticket.assigned.done() else None


async def test_load_is_relative_to_capacity(registry, dispatcher):
    add(registry, "big", capacity=6)
    add(registry, "small", capacity=2)
    got = [worker_of(enqueue(dispatcher, number)) for number in range(8)]
    assert got[:4] == ["big", "small", "big", "big"], "2 of 6 is less than 1 of 2"
    assert sorted(got) == ["big"] * 6 + ["small"] * 2


async def test_equal_load_goes_to_the_worker_that_was_idle_longest(registry, dispatcher):
    add(registry, "a")
    add(registry, "b")
    order = []
    for number in range(4):
        ticket = enqueue(dispatcher, number)
        order.append(worker_of(ticket))
        dispatcher.release(ticket)
    assert order == ["a", "b", "a", "b"]


async def test_the_line_is_first_in_first_out(registry, dispatcher):
    tickets = [enqueue(dispatcher, number) for number in range(3)]
    add(registry, "w")
    assert [worker_of(ticket) for ticket in tickets] == ["w", None, None]
    dispatcher.release(tickets[0])
    assert [worker_of(ticket) for ticket in tickets[1:]] == ["w", None]


async def test_a_prompt_that_none_can_serve_does_not_block_those_behind_it(registry, dispatcher):
    add(registry, "w", step=1)
    first = enqueue(dispatcher, 0, min_weight_version=WeightVersion(run_id="run", step=2))
    second = enqueue(dispatcher, 1)
    assert worker_of(first) is None
    assert worker_of(second) == "w"
    assert dispatcher.waiting == 1


async def test_a_requeued_prompt_keeps_its_place(registry, dispatcher):
    worker = add(registry, "w")
    first = enqueue(dispatcher, 0)
    second = enqueue(dispatcher, 1)
    registry.suspend(worker, "it failed")
    dispatcher.release(first)
    dispatcher.enqueue(first)
    registry.heartbeat(worker.lease_id, report())
    assert worker_of(first) == "w"
    assert worker_of(second) is None


@pytest.mark.parametrize(
    ("have", "want", "served"),
    [
        (("run", 2), ("run", 2), True),
        (("run", 3), ("run", 2), True),
        (("run", 1), ("run", 2), False),
        (("other", 9), ("run", 2), False),
        (("other", 9), ("run", 0), False),
        (("", 0), ("run", 0), False),
        (("other", 9), ("", 0), True),
    ],
)
async def test_min_weight_version(registry, dispatcher, have, want, served):
    worker = add(registry, "w")
    registry.heartbeat(worker.lease_id, report(run_id=have[0], step=have[1]))
    ticket = enqueue(dispatcher, 0, min_weight_version=WeightVersion(run_id=want[0], step=want[1]))
    assert (worker_of(ticket) == "w") is served


async def test_a_worker_that_catches_up_gets_the_waiting_prompt(registry, dispatcher):
    worker = add(registry, "w", step=1)
    ticket = enqueue(dispatcher, 0, min_weight_version=WeightVersion(run_id="run", step=2))
    assert "step 1" in dispatcher.explain(ticket)
    registry.heartbeat(worker.lease_id, report(step=2))
    assert worker_of(ticket) == "w"


async def test_group_size_and_image_size_choose_the_worker(registry, dispatcher):
    add(registry, "a-narrow", capacity=9, max_group_size=4, size_multiple_px=16)
    add(registry, "b-wide", capacity=9, max_group_size=64, size_multiple_px=8)
    assert worker_of(enqueue(dispatcher, 0, sample_count=8)) == "b-wide"
    assert worker_of(enqueue(dispatcher, 1, height_px=24, width_px=32)) == "b-wide"
    assert worker_of(enqueue(dispatcher, 2, sample_count=4, height_px=32, width_px=32)) == "a-narrow"


async def test_a_worker_that_failed_the_prompt_comes_last_and_not_before_its_next_heartbeat(registry, dispatcher):
    failed = add(registry, "a", capacity=9)
    ticket = Ticket(number=0, failed_on={failed.lease_id: failed.heartbeats})
    dispatcher.enqueue(ticket)
    assert worker_of(ticket) is None
    assert "just failed" in dispatcher.explain(ticket)
    registry.heartbeat(failed.lease_id, report())
    assert worker_of(ticket) == "a"
    dispatcher.release(ticket)
    add(registry, "b", capacity=9)
    enqueue(dispatcher, 1)  # goes to b, which now is the busier one
    dispatcher.enqueue(ticket)
    assert worker_of(ticket) == "b"


async def test_a_ticket_that_leaves_frees_the_worker_it_had_not_picked_up(registry, dispatcher):
    worker = add(registry, "w")
    leaving, waiting = enqueue(dispatcher, 0), enqueue(dispatcher, 1)
    dispatcher.release(leaving)
    dispatcher.release(leaving)
    assert worker.assigned == 1
    assert worker_of(waiting) == "w"


async def test_closing_fails_those_who_wait_and_those_who_come(registry, dispatcher):
    waiting = enqueue(dispatcher, 0)
    dispatcher.close(Unavailable("leaving"))
    late = enqueue(dispatcher, 1)
    for ticket in (waiting, late):
        with pytest.raises(Unavailable, match="leaving"):
            await dispatcher.acquire(ticket)
    assert dispatcher.waiting == 0


async def test_explain_is_empty_when_a_worker_is_only_busy(registry, dispatcher):
    ticket = enqueue(dispatcher, 0)
    assert "no worker is registered" in dispatcher.explain(ticket)
    add(registry, "w")
    busy = enqueue(dispatcher, 1)
    assert worker_of(busy) is None
    assert dispatcher.explain(busy) == ""
