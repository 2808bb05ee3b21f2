"""The router over real gRPC, with workers that die, stall, refuse or lag at exact points."""

import asyncio
import re
import signal
import sys
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fleet import (
    DEADLINE_S,
    ScriptedWorker,
    by_kind,
    die_after_one_sample,
    fail_with,
    fleet,
    forget_the_first_sample,
    forget_the_outcome,
    prompt,
    wait_for_gate,
)

from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfBudget,
    Unavailable,
    duration,
    from_item_error,
)
from headwater.rollout.v1.rollout_pb2 import WorkerState
from headwater.router.v1 import router_pb2 as pb
from headwater.router.v1.router_pb2_grpc import RouterServiceStub
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error


async def error_of(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return from_rpc_error(caught.value)


async def within(awaitable):
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable


# Results -------------------------------------------------------------------------------------------------------------


async def test_a_stream_gives_acceptance_samples_and_outcome_of_every_prompt():
    async with fleet(ScriptedWorker("w1"), ScriptedWorker("w2")) as f:
        prompts = [prompt(n=2, request_id=f"r{i}") for i in range(6)]
        events = [event async for event in f.stream(*prompts)]
        for i in range(6):
            mine = [event for event in events if event.request_id == f"r{i}"]
            assert by_kind(mine) == ["accepted", "sample", "sample", "outcome"]
            assert [event.sample.id.index for event in mine[1:3]] == [0, 1]
            assert mine[0].accepted.group_id == mine[3].outcome.group_id == f"r{i}"
        assert Counter(e.outcome.worker_id for e in events if e.HasField("outcome")) == {"w1": 3, "w2": 3}
        status = await f.status()
        assert (status.finished_groups, status.running_prompts, status.queued_prompts) == (6, 0, 0)


async def test_the_unary_form_answers_with_samples_by_index_and_makes_ids_and_seeds():
    async with fleet(worker := ScriptedWorker("w1")) as f:
        response = await f.submit(prompt(n=3))
        assert [sample.id.index for sample in response.samples] == [0, 1, 2]
        assert response.request_id
        assert response.outcome.group_id == response.request_id == worker.calls[0].group_id
        assert len({sample.seed for sample in response.samples}) == 3


async def test_a_bad_prompt_in_a_stream_is_one_error_and_the_stream_goes_on():
    async with fleet(ScriptedWorker("w1")) as f:
        events = [e async for e in f.stream(prompt("", request_id="bad"), prompt(request_id="good"))]
        (bad,) = [e for e in events if e.request_id == "bad"]
        error = from_item_error(bad.error)
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.reason) == ("prompt.text", "PROMPT_EMPTY")
        assert by_kind(e for e in events if e.request_id == "good") == ["accepted", "sample", "outcome"]


async def test_bad_requests_have_their_code_and_field():
    async with fleet(ScriptedWorker("w1")) as f:
        odd_size = prompt()
        odd_size.sampling.width_px = 70
        window = prompt()
        window.sampling.transition.window.size = 9
        for request, field in (
            (prompt(""), "prompt.text"),
            (prompt(n=0), "prompt.sample_count"),
            (prompt(n=17), "prompt.sample_count"),
            (odd_size, "prompt.sampling.width_px"),
            (window, "prompt.sampling.transition.window"),
        ):
            error = await error_of(f.submit(request))
            assert isinstance(error, InvalidArgument)
            assert error.field == field


# Failing workers -----------------------------------------------------------------------------------------------------


async def test_a_worker_that_dies_in_mid_stream_is_replaced_without_duplicate_samples():
    dying = ScriptedWorker("a-dies", die_after_one_sample)
    async with fleet(dying, heir := ScriptedWorker("b-heir")) as f:
        events = [event async for event in f.stream(prompt(n=3, seeds=[11, 12, 13]))]
        assert by_kind(events) == ["accepted", "sample", "sample", "sample", "outcome"]
        assert [e.sample.seed for e in events[1:4]] == [11, 12, 13]
        assert events[-1].outcome.worker_id == "b-heir"
        assert dying.calls == heir.calls, "the retry is the same request, seeds included"
        status = await f.status()
        assert status.retried_attempts == 1
        assert not status.workers[0].accepting, "nothing is sent to it before its next heartbeat"


async def test_a_silent_worker_expires_and_its_group_goes_to_another():
    stalled, heir = ScriptedWorker("a-stalls", wait_for_gate), ScriptedWorker("b-heir")
    async with fleet(stalled, heartbeat_interval_s=0.1, expiry_s=0.5) as f:
        submission = asyncio.ensure_future(f.submit(prompt()))
        await within(stalled.called.wait())
        await f.wait_for(lambda status: not status.workers and status.queued_prompts == 1)  # no heartbeat comes
        await f.add(heir)
        assert (await within(submission)).outcome.worker_id == "b-heir"
        await within(stalled.cancelled.wait())
        assert isinstance(await error_of(f.beat(stalled)), NotFound)


async def test_a_worker_that_registers_again_gets_its_lost_group_back():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        submission = asyncio.ensure_future(f.submit(prompt()))
        await within(worker.called.wait())
        await f.register(worker)
        await within(submission)
        await within(worker.cancelled.wait())
        assert len(worker.calls) == 2


async def test_a_single_worker_is_tried_again_after_its_heartbeat():
    async with fleet(worker := ScriptedWorker("w1", fail_with(Unavailable("busy dying")))) as f:
        submission = asyncio.ensure_future(f.submit(prompt()))
        status = await f.wait_for(lambda status: status.retried_attempts == 1 and status.queued_prompts == 1)
        assert "busy dying" in status.workers[0].not_accepting_reason
        await f.beat(worker)
        await within(submission)
        assert len(worker.calls) == 2


async def test_attempts_are_limited_and_the_last_error_is_told():
    workers = [ScriptedWorker(f"w{i}", fail_with(Internal(f"CUDA error {i}", reason="CUDA"))) for i in range(3)]
    async with fleet(*workers, max_attempts=2) as f:
        error = await error_of(f.submit(prompt()))
        assert isinstance(error, Internal)
        assert error.reason == "CUDA"
        assert "attempt 2 of 2" in error.message
        assert sum(len(worker.calls) for worker in workers) == 2


@pytest.mark.parametrize("flaw", [forget_the_outcome, forget_the_first_sample])
async def test_a_group_that_is_not_complete_counts_as_a_failed_attempt(flaw):
    async with fleet(ScriptedWorker("a-forgets", flaw), ScriptedWorker("b-heir")) as f:
        events = [event async for event in f.stream(prompt(n=2))]
        assert by_kind(events) == ["accepted", "sample", "sample", "outcome"]
        assert events[-1].outcome.worker_id == "b-heir"


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("no such key", field="rewards[0].params", reason="REWARD_PARAMS"),
        NotFound("reward 'x' is not hosted", field="rewards[0].name", reason="REWARD_UNKNOWN"),
        FailedPrecondition("the reward fails the run", reason="REWARD_FAILS_RUN"),
    ],
)
async def test_what_every_worker_would_refuse_is_final(error):
    async with fleet(ScriptedWorker("w1", fail_with(error)), ScriptedWorker("w2")) as f:
        told = await error_of(f.submit(prompt()))
        assert type(told) is type(error)
        assert told.reason == error.reason
        assert told.field == (error.field and f"prompt.{error.field}")
        assert (await f.status()).retried_attempts == 0


# Weights -------------------------------------------------------------------------------------------------------------


async def test_a_prompt_waits_for_weights_that_are_new_enough():
    async with fleet(worker := ScriptedWorker("w1", step=1)) as f:
        wanted = WeightVersion(run_id="run", step=2)
        waiting = asyncio.ensure_future(f.submit(prompt(min_weight_version=wanted)))
        await f.wait_for(lambda status: status.queued_prompts == 1)
        await f.submit(prompt())  # any weights will do, and it is not held up
        assert len(worker.calls) == 1
        worker.version.step = 2
        await f.beat(worker)
        assert (await within(waiting)).outcome.weight_version == wanted


async def test_a_stale_worker_costs_no_attempt():
    stale = FailedPrecondition("weights are of step 1", reason="WEIGHTS_TOO_OLD")
    worker = ScriptedWorker("w1", *[fail_with(stale)] * 3, step=2)
    async with fleet(worker, max_attempts=1) as f:
        wanted = WeightVersion(run_id="run", step=2)
        waiting = asyncio.ensure_future(f.submit(prompt(min_weight_version=wanted)))
        for calls in (1, 2, 3):
            await f.wait_for(lambda status, calls=calls: status.queued_prompts == 1 and len(worker.calls) == calls)
            await f.beat(worker)
        await within(waiting)
        assert (await f.status()).retried_attempts == 0


# Ends that the client or an operator asks for ------------------------------------------------------------------------


async def test_cancel_reaches_the_worker_and_is_idempotent():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        running = asyncio.ensure_future(f.submit(prompt(request_id="running")))
        queued = asyncio.ensure_future(f.submit(prompt(request_id="queued")))
        await within(worker.called.wait())
        await f.wait_for(lambda status: status.queued_prompts == 1)

        async def cancel(request_id):
            response = await f.stub.CancelRequest(pb.CancelRequestRequest(request_id=request_id), timeout=DEADLINE_S)
            return response.cancelled

        for name, task in (("queued", queued), ("running", running)):
            assert await cancel(name)
            assert isinstance(await error_of(within(task)), Cancelled)
            assert not await cancel(name)
        await within(worker.cancelled.wait())
        assert isinstance(await error_of(cancel("never-seen")), NotFound)
        await f.submit(prompt())
        assert (await f.status()).workers[0].assigned_groups == 0


async def test_a_broken_stream_cancels_its_prompts_and_no_others():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate, wait_for_gate, capacity=2)) as f:
        other = asyncio.ensure_future(f.submit(prompt()))
        await within(worker.called.wait())
        call = f.stub.SubmitPrompts(timeout=DEADLINE_S)
        for _ in range(2):
            await call.write(pb.SubmitPromptsRequest(prompt=prompt()))
        await f.wait_for(lambda status: status.running_prompts == 2 and status.queued_prompts == 1)
        call.cancel()
        await within(worker.cancelled.wait())
        await f.wait_for(lambda status: status.running_prompts == 1 and status.queued_prompts == 0)
        worker.gate.set()
        await within(other)


async def test_a_unary_client_that_leaves_cancels_its_prompt():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        call = f.stub.SubmitPrompt(pb.SubmitPromptRequest(prompt=prompt()), timeout=DEADLINE_S)
        await within(worker.called.wait())
        call.cancel()
        await within(worker.cancelled.wait())
        await f.wait_for(lambda status: status.running_prompts == 0)


async def test_a_deadline_names_the_worker_that_was_too_slow_and_stops_it():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        error = await error_of(f.submit(prompt(timeout=duration(0.4))))
        assert isinstance(error, DeadlineExceeded)
        assert "w1" in error.message
        await within(worker.cancelled.wait())


async def test_a_deadline_without_a_worker_is_unavailable_and_says_why():
    async with fleet() as f:
        error = await error_of(f.submit(prompt(timeout=duration(0.1))))
        assert isinstance(error, Unavailable)
        assert "no worker is registered" in error.message
        worker = ScriptedWorker("w1")
        worker.state = WorkerState.WORKER_STATE_STARTING
        await f.add(worker)
        error = await error_of(f.submit(prompt(timeout=duration(0.1))))
        assert "w1: its state is STARTING" in error.message


async def test_a_request_id_is_unique_while_it_runs():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        first = asyncio.ensure_future(f.submit(prompt(request_id="same")))
        await within(worker.called.wait())
        error = await error_of(f.submit(prompt(request_id="same")))
        assert isinstance(error, AlreadyExists)
        assert error.field == "prompt.request_id"
        worker.gate.set()
        await within(first)
        await f.submit(prompt(request_id="same"))


# Admission -----------------------------------------------------------------------------------------------------------


async def set_budget(f, capacity, charged=()):
    request = pb.SetBudgetRequest(run_id="run", capacity_groups=capacity, charged_group_ids=charged)
    return (await f.stub.SetBudget(request, timeout=DEADLINE_S)).charged_groups


async def test_a_full_budget_is_resource_exhausted_with_retry_info_until_groups_are_released():
    async with fleet(ScriptedWorker("w1")) as f:
        await set_budget(f, 2)
        for group in ("a", "b", "a"):  # the same group again costs nothing
            await f.submit(prompt(run_id="run", group_id=group))
        error = await error_of(f.submit(prompt(run_id="run", group_id="c")))
        assert isinstance(error, OutOfBudget)
        assert error.retry_after_s is not None
        (refused,) = [event async for event in f.stream(prompt(run_id="run", group_id="c"))]
        assert refused.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.error.HasField("retry_after")
        (budget,) = (await f.status()).budgets
        assert (budget.run_id, budget.capacity_groups, budget.charged_groups) == ("run", 2, 2)
        release = pb.ReleaseGroupsRequest(run_id="run", group_ids=["a"])
        assert (await f.stub.ReleaseGroups(release, timeout=DEADLINE_S)).charged_groups == 1
        await f.submit(prompt(run_id="run", group_id="c"))


async def test_setting_a_budget_again_states_what_is_charged():
    async with fleet(ScriptedWorker("w1")) as f:
        assert await set_budget(f, 2, ["x", "y"]) == 2
        assert isinstance(await error_of(f.submit(prompt(run_id="run", group_id="z"))), OutOfBudget)
        assert await set_budget(f, 2, ["x"]) == 1
        await f.submit(prompt(run_id="run", group_id="z"))
        await set_budget(f, 0)
        assert isinstance(await error_of(f.submit(prompt(run_id="run", group_id="z"))), FailedPrecondition)


async def test_prompts_without_a_budget_are_limited_by_the_queue():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate), queue_capacity=2) as f:
        await set_budget(f, 5)
        events = []

        async def read():
            async for event in call:
                events.append(event)

        budgeted = [prompt(run_id="run", request_id=f"budgeted{i}") for i in range(2)]
        first, *others = [prompt(request_id=f"r{i}") for i in range(4)]
        call = f.stream(first, budgeted[0], *others, budgeted[1])
        reading = asyncio.ensure_future(read())
        await f.wait_for(lambda status: status.queued_prompts == 4)
        worker.gate.set()
        await within(reading)
        errors = {event.request_id: event.error.reason for event in events if event.HasField("error")}
        assert errors == {"r3": "QUEUE_FULL"}
        assert [e.accepted.queue_position for e in events if e.HasField("accepted")] == [0, 0, 1, 2, 3]


async def test_the_line_is_served_in_order_of_arrival():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        call = f.stream(*[prompt(f"prompt {i}") for i in range(8)])
        await f.wait_for(lambda status: status.queued_prompts == 7)
        worker.gate.set()
        assert by_kind([event async for event in call]).count("outcome") == 8
        assert [request.prompt for request in worker.calls] == [f"prompt {i}" for i in range(8)]


# Workers that leave --------------------------------------------------------------------------------------------------


async def test_a_drained_worker_finishes_and_gets_nothing_new():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate, capacity=2), ScriptedWorker("w2")) as f:
        running = asyncio.ensure_future(f.submit(prompt()))
        await within(worker.called.wait())
        drain = pb.DrainWorkerRequest(worker_id="w1", reason="maintenance")
        assert (await f.stub.DrainWorker(drain, timeout=DEADLINE_S)).active_groups == 1
        assert (await f.beat(worker)).drain
        for _ in range(3):
            assert (await f.submit(prompt())).outcome.worker_id == "w2"
        status = (await f.status()).workers[0]
        assert not status.accepting
        assert "maintenance" in status.not_accepting_reason
        worker.gate.set()
        assert (await within(running)).outcome.worker_id == "w1"
        gone = pb.DeregisterWorkerRequest(lease_id=worker.lease_id)
        for _ in range(2):
            await f.stub.DeregisterWorker(gone, timeout=DEADLINE_S)
        assert [w.worker_id for w in (await f.status()).workers] == ["w2"]


async def test_a_quarantined_worker_returns_with_newer_weights():
    async with fleet(worker := ScriptedWorker("w1", step=1)) as f:
        quarantine = pb.DrainWorkerRequest(worker_id="w1", quarantine=True, reason="lost the update")
        await f.stub.DrainWorker(quarantine, timeout=DEADLINE_S)
        waiting = asyncio.ensure_future(f.submit(prompt()))
        await f.wait_for(lambda status: status.queued_prompts == 1)
        assert not (await f.beat(worker)).drain, "it must stay alive to catch up"
        assert not worker.calls
        worker.version.step = 2
        await f.beat(worker)
        await within(waiting)


# The process ---------------------------------------------------------------------------------------------------------


async def start_router(*argv):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headwater_router", "--bind", "127.0.0.1:0", *argv, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(30):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(r"listens on (\S+)", line):
                return process, found.group(1)
    raise AssertionError("the router did not start")


async def test_sigterm_finishes_running_groups_refuses_new_ones_and_exits_0():
    process, address = await start_router()
    worker = ScriptedWorker("w1", wait_for_gate)
    await worker.start()
    async with aio_channel(address) as channel:
        stub, health = RouterServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        registration = pb.RegisterWorkerRequest(
            worker_id="w1", address=worker.address, report=worker.report(), capacity_groups=1
        )
        await stub.RegisterWorker(registration, timeout=DEADLINE_S)
        states = health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).__aiter__()
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.SERVING
        call = stub.SubmitPrompts(timeout=DEADLINE_S)
        for name in ("running", "queued"):
            await call.write(pb.SubmitPromptsRequest(prompt=prompt(request_id=name)))
        await within(worker.called.wait())
        idle = stub.SubmitPrompts(timeout=DEADLINE_S)
        await idle.wait_for_connection()
        accepted = [await call.read() for _ in range(2)]
        assert by_kind(accepted) == ["accepted", "accepted"]

        process.send_signal(signal.SIGTERM)
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        queued = await within(call.read())
        assert (queued.request_id, queued.error.reason) == ("queued", "DRAINING")
        refusal = await error_of(stub.SubmitPrompt(pb.SubmitPromptRequest(prompt=prompt()), timeout=DEADLINE_S))
        assert isinstance(refusal, Unavailable)
        assert refusal.reason == "DRAINING"

        worker.gate.set()
        rest = [await within(call.read()) for _ in range(2)]
        assert by_kind(rest) == ["sample", "outcome"]
        assert (await error_of(within(call.read()))).reason == "DRAINING"
        assert await within(process.wait()) == 0
    await worker.die()


async def test_sigterm_without_work_exits_0_although_streams_are_open():
    process, address = await start_router()
    async with aio_channel(address) as channel:
        stub = RouterServiceStub(channel)
        watch, idle = stub.WatchStatus(pb.WatchStatusRequest(), timeout=DEADLINE_S), stub.SubmitPrompts()
        await watch.read()
        await idle.wait_for_connection()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await process.wait() == 0


async def test_a_public_bind_is_refused_with_the_remedy():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headwater_router", "--bind", "0.0.0.0:0", stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await within(process.communicate())
    assert process.returncode == 1
    assert b"--insecure" in stderr
