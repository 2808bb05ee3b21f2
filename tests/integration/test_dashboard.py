"""The dashboard as a process, against the real router and trainer services (the trainer's without training)."""

import asyncio
import contextlib
import json
import re
import signal
import sys
import urllib.request

from headwater_router.config import RouterConfig
from headwater_router.service import SERVICE, RouterService
from headwater_trainer.runs import RunBoard
from headwater_trainer.service import TrainerServicer

from headwater.rollout.v1.rollout_pb2 import GetWorkerInfoResponse, WorkerState
from headwater.router.v1.router_pb2 import RegisterWorkerRequest, SetBudgetRequest, WorkerReport
from headwater.router.v1.router_pb2_grpc import RouterServiceStub, add_RouterServiceServicer_to_server
from headwater.rpc.channel import aio_channel
from headwater.rpc.server import Server
from headwater.trainer.v1.trainer_pb2 import Run, RunState, StartRunRequest
from headwater.trainer.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server

NOBODY = "127.0.0.1:1"


@contextlib.asynccontextmanager
async def dashboard(router=NOBODY, trainer=NOBODY):
    """Serves the dashboard in a process; yields its URL. It must end well on SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headwater_dashboard", "--bind", "127.0.0.1:0", "--router", router, "--trainer", trainer,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(30):
            while not (found := re.search(r"running on (http://\S+)", (await process.stderr.readline()).decode())):
                assert process.returncode is None
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            await process.stderr.read()
            assert await process.wait() in (0, -signal.SIGTERM)


async def get(url):
    def read():
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.read().decode()

    return await asyncio.to_thread(read)


async def status_when(url, condition):
    async with asyncio.timeout(20):
        while not condition(state := json.loads(await get(f"{url}/api/status"))):
            await asyncio.sleep(0.1)
    return state


@contextlib.asynccontextmanager
async def serving_router():
    service = RouterService(RouterConfig(expiry_s=60))
    server = Server("127.0.0.1:0", name="router")
    server.add(add_RouterServiceServicer_to_server, service, SERVICE)
    address = await server.start()
    await service.open()
    async with aio_channel(address) as channel:
        yield address, RouterServiceStub(channel)
    await service.close()
    await server.stop(0)


@contextlib.asynccontextmanager
async def serving_trainer(board, output_root, bind="127.0.0.1:0"):
    server = Server(bind, name="trainer")
    servicer = TrainerServicer(board, output_root)
    server.add(add_TrainerServiceServicer_to_server, servicer, "headwater.trainer.v1.TrainerService")
    yield await server.start()
    await server.stop(0)


def start_run(board, run_id):
    run = Run(run_id=run_id, state=RunState.RUN_STATE_STARTING, total_steps=10)
    return board.start(StartRunRequest(run_id=run_id), run)


async def test_services_that_do_not_answer_are_named_with_a_remedy():
    async with dashboard() as url:
        state = json.loads(await get(f"{url}/api/status"))
        page = await get(url)
        health = json.loads(await get(f"{url}/healthz"))
    for name in ("router", "trainer"):
        assert state[name]["ok"] is False
        assert f"{NOBODY} does not answer (UNAVAILABLE" in state[name]["error"]
        assert f"start headwater-{name} or give its address with --{name}" in page
    assert health == {"status": "ok"}


async def test_workers_and_budgets_of_the_router_are_shown_and_text_is_escaped():
    async with serving_router() as (address, router), dashboard(router=address) as url:
        report = WorkerReport(state=WorkerState.WORKER_STATE_READY, active_groups=1)
        info = GetWorkerInfoResponse(worker_id="w", engine="diffusers", device="<b>cpu</b>")
        await router.RegisterWorker(
            RegisterWorkerRequest(
                worker_id="worker-7", address="127.0.0.1:7410", info=info, report=report, capacity_groups=2
            ),
            timeout=5,
        )
        await router.SetBudget(SetBudgetRequest(run_id="r1", capacity_groups=8, charged_group_ids=["g1"]), timeout=5)
        state, page = json.loads(await get(f"{url}/api/status")), await get(url)
    (worker,) = state["router"]["reply"]["workers"]
    assert (worker["worker_id"], worker["capacity_groups"]) == ("worker-7", 2)
    assert state["router"]["reply"]["budgets"] == [{"run_id": "r1", "capacity_groups": 8, "charged_groups": 1}]
    assert "worker-7<td>ready" in page
    assert "Budget of r1: 1 of 8 groups charged" in page
    assert "&lt;b&gt;cpu&lt;/b&gt;" in page
    assert "<b>cpu" not in page


async def test_the_reward_curve_follows_the_run_and_starts_anew_with_the_next(tmp_path):
    board = RunBoard()
    async with serving_trainer(board, tmp_path) as address, dashboard(trainer=address) as url:
        waiting = json.loads(await get(f"{url}/api/status"))["trainer"]
        assert (waiting["ok"], waiting["steps"]) == (True, [])
        assert "No run yet" in await get(url)

        first = start_run(board, "first")
        first.set_state(RunState.RUN_STATE_RUNNING)
        for step, reward in enumerate([0.25, 0.5, 0.75], start=1):
            first.add_metrics(step, {"reward/mean": reward})
        first.notice("REWARD_UNAVAILABLE", "no reward server answers; start headwater-reward")
        state = await status_when(url, lambda state: state["trainer"]["notices"])
        assert [row["reward/mean"] for row in state["trainer"]["steps"]] == [0.25, 0.5, 0.75]
        page = await get(url)
        assert 'points="0.0,160.0 300.0,80.0 600.0,0.0"' in page
        assert "no reward server answers" in page
        assert "running, step 0 of 10" in page

        first.set_state(RunState.RUN_STATE_FAILED, "out of memory")
        assert "out of memory" in await get(url)
        second = start_run(board, "second")
        second.add_metrics(1, {"reward/mean": 0.1})
        state = await status_when(url, lambda state: state["trainer"]["run_id"] == "second")
        state = await status_when(url, lambda state: state["trainer"]["steps"])
        assert [row["reward/mean"] for row in state["trainer"]["steps"]] == [0.1]
        assert state["trainer"]["notices"] == []


async def test_a_trainer_that_comes_back_is_found_again(tmp_path):
    board = RunBoard()
    record = start_run(board, "r")
    async with serving_trainer(board, tmp_path) as address:
        pass  # only to learn a free port
    async with dashboard(trainer=address) as url:
        for step in (1, 2):
            await status_when(url, lambda state: not state["trainer"]["ok"])
            record.add_metrics(step, {"reward/mean": 0.5})
            async with serving_trainer(board, tmp_path, bind=address):
                state = await status_when(url, lambda state, step=step: len(state["trainer"]["steps"]) == step)
                assert state["trainer"]["ok"]
