"""Feeder and stream source at a real router and a real Redis, with workers that follow a script."""

import asyncio
import uuid
from dataclasses import dataclass

import pytest
from headwater_trainer.background import BackgroundLoop
from headwater_trainer.feeder import Feeder
from headwater_trainer.groups import Cursor, GroupBatch, Signal
from headwater_trainer.prompt_order import PromptOrder
from headwater_trainer.stream_source import StreamSource
from router_fleet import DEADLINE_S, Fleet, ScriptedWorker, fail_with, fleet

from headwater.common.v1.sample_pb2 import FilterDecision, FilterVerdict, Sample, ScoredGroup, WeightVersion
from headwater.config.load import parse_recipe
from headwater.config.prompts import load_prompts
from headwater.errors import InvalidArgument, Unavailable
from headwater.rollout.v1.rollout_pb2 import GenerateGroupResponse, GroupOutcome
from headwater.stream.publisher import ScoredPublisher
from headwater.stream.scored import ScoredStream
from headwater.tensors.blobs import BlobStore

RECIPE = """
[run]
deterministic = {deterministic}
[model]
path = "unused"
[sampling]
steps = 4
height_px = 64
width_px = 64
[prompts]
texts = ["a", "b", "c"]
[[rewards]]
name = "ocr"
[train]
steps = {steps}
groups_per_step = 2
group_size = 2
staleness_bound = {staleness}
"""


def publish_with(redis_url, store):
    """A step that publishes the group, with a blob, as the worker's present weights."""

    async def step(worker, request):
        (blob,) = await asyncio.to_thread(store.put, f"{request.run_id}/groups/{request.group_id}.bin", [b"x" * 8])
        group = ScoredGroup(run_id=request.run_id, group_id=request.group_id, prompt=request.prompt)
        for index in range(len(request.seeds)):
            sample = Sample(first_step_version=worker.version)
            sample.trajectory.latents.blob.CopyFrom(blob)
            group.samples.append(sample)
            yield worker.sample(request, index)
        publisher = ScoredPublisher(redis_url)
        await publisher.publish(group)
        await publisher.close()
        yield outcome(worker, request, FilterVerdict.FILTER_VERDICT_KEPT)

    return step


async def drop(worker, request):
    for index in range(len(request.seeds)):
        yield worker.sample(request, index)
    yield outcome(worker, request, FilterVerdict.FILTER_VERDICT_DROPPED)


def outcome(worker, request, verdict):
    kept = verdict == FilterVerdict.FILTER_VERDICT_KEPT
    return GenerateGroupResponse(
        outcome=GroupOutcome(
            group_id=request.group_id, filter_decision=FilterDecision(verdict=verdict, filter="zero_variance"),
            published=kept, weight_version=worker.version, worker_id=worker.worker_id,
        )
    )  # fmt: skip


@dataclass
class Rig:
    """A source with its feeder, used from threads as the trainer does."""

    source: StreamSource
    feeder: Feeder
    stream: ScoredStream
    store: BlobStore
    worker: ScriptedWorker
    notices: list
    asked: list
    fleet: Fleet
    run_id: str

    async def start(self, step=0, cursor=None):
        if self.worker.address:
            await self.fleet.beat(self.worker)  # the router learns that it serves this run
        await asyncio.to_thread(self.source.start, step, cursor or Cursor())

    async def take(self, step=0):
        async with asyncio.timeout(DEADLINE_S):
            while (got := await asyncio.to_thread(self.source.take, step)) is Signal.WAIT:
                pass
        return got

    async def trained(self, step):
        self.worker.version = WeightVersion(run_id=self.worker.version.run_id, step=step)
        await self.fleet.beat(self.worker)
        await asyncio.to_thread(self.source.trained, step)


@pytest.fixture
async def make_rig(redis_url, tmp_path):
    """A function that builds a rig at a router; the rig of a restarted trainer when given another's run."""
    made = []

    def build(at, worker, *, run_id=None, steps=3, staleness=0, deterministic=False):
        recipe = parse_recipe(RECIPE.format(steps=steps, staleness=staleness, deterministic=str(deterministic).lower()))
        run_id = run_id or f"run-{uuid.uuid4().hex[:8]}"
        worker.version = WeightVersion(run_id=run_id, step=worker.version.step)
        notices, asked = [], []
        order = PromptOrder(load_prompts(recipe.prompts), seed=0, shuffle=True)
        feeder = Feeder(at.address, run_id, recipe, order, lambda reason, message: notices.append(reason))
        stream, store, background = ScoredStream(redis_url, run_id), BlobStore(str(tmp_path)), BackgroundLoop("test")
        source = StreamSource(
            recipe, run_id, stream, store, feeder, background, asked=lambda: asked.pop() if asked else None,
            idle=lambda: None, notice=lambda reason, message: notices.append(reason), wait_limit_s=DEADLINE_S,
        )  # fmt: skip
        rig = Rig(source, feeder, stream, store, worker, notices, asked, at, run_id)
        made.append((source, background))
        return rig

    yield build
    for source, background in made:
        await asyncio.to_thread(source.close)
        await asyncio.to_thread(background.close)


def worker_of(redis_url, tmp_path, *script):
    worker = ScriptedWorker("w", *script, capacity=4)
    publish = publish_with(redis_url, BlobStore(str(tmp_path)))
    worker.script = [step or publish for step in script] + [publish] * 50
    return worker


async def test_each_step_gets_its_groups_and_no_more_are_submitted_than_the_run_needs(make_rig, redis_url, tmp_path):
    worker = worker_of(redis_url, tmp_path)
    async with fleet(worker) as at:
        rig = make_rig(at, worker, steps=2)
        await rig.start()
        first = await rig.take()
        assert [group.group_id for group in first.groups] == ["g00000000", "g00000001"]
        await rig.trained(1)
        second = await rig.take(1)
        assert [group.group_id for group in second.groups] == ["g00000002", "g00000003"]
        await rig.trained(2)
        await asyncio.sleep(0.3)
        assert len(worker.calls) == 4
        assert [call.min_weight_version.step for call in worker.calls] == [0, 0, 1, 1]
        assert worker.calls[0].min_weight_version.run_id == rig.run_id
        budget = (await at.status()).budgets[0]
        assert (budget.capacity_groups, budget.charged_groups) == (2, 0)


async def test_a_dropped_group_is_replaced(make_rig, redis_url, tmp_path):
    worker = worker_of(redis_url, tmp_path, drop, None)
    async with fleet(worker) as at:
        rig = make_rig(at, worker)
        await rig.start()
        batch = await rig.take()
        assert len(batch.groups) == 2
        assert batch.dropped == 1
        assert len({call.group_id for call in worker.calls}) == 3


async def test_a_group_that_failed_is_submitted_again_with_the_same_seeds(make_rig, redis_url, tmp_path):
    worker = worker_of(redis_url, tmp_path, *[fail_with(Unavailable("busy", retry_after_s=0.01))] * 5)
    async with fleet(worker, max_attempts=1) as at:
        rig = make_rig(at, worker)
        await rig.start()
        beating = asyncio.create_task(keep_beating(at, worker))
        batch = await rig.take()
        beating.cancel()
        assert len(batch.groups) == 2
        seeds = {}
        for call in worker.calls:
            assert seeds.setdefault(call.group_id, list(call.seeds)) == list(call.seeds)


async def keep_beating(at, worker):
    while True:
        await at.beat(worker)
        await asyncio.sleep(0.05)


async def test_a_request_that_can_never_work_ends_the_run_with_its_reason(make_rig, redis_url, tmp_path):
    error = InvalidArgument("reward 'ocr' is unknown here", field="rewards.name", reason="REWARD_UNKNOWN")
    worker = worker_of(redis_url, tmp_path, fail_with(error))
    async with fleet(worker) as at:
        rig = make_rig(at, worker)
        await rig.start()
        with pytest.raises(InvalidArgument, match="reward 'ocr' is unknown here"):
            await rig.take()


async def test_entries_and_blobs_go_only_after_the_checkpoint(make_rig, redis_url, tmp_path):
    worker = worker_of(redis_url, tmp_path)
    async with fleet(worker) as at:
        rig = make_rig(at, worker, steps=1)
        await rig.start()
        await rig.take()
        await rig.trained(1)
        assert rig.stream.length() == 2
        assert len(list(tmp_path.rglob("*.bin"))) == 2
        assert rig.source.cursor().consumed == ["g00000000", "g00000001"]
        await asyncio.to_thread(rig.source.settle)
        assert rig.stream.length() == 0
        assert list(tmp_path.rglob("*.bin")) == []


async def test_a_restarted_trainer_trains_what_was_trained_after_its_checkpoint_again(make_rig, redis_url, tmp_path):
    worker = worker_of(redis_url, tmp_path)
    async with fleet(worker) as at:
        killed = make_rig(at, worker, steps=4, deterministic=True)
        await killed.start()
        await killed.take()
        await killed.trained(1)
        cursor = killed.source.cursor()  # the checkpoint after step 1, not acknowledged when the trainer dies
        lost = await killed.take(1)
        await killed.trained(2)
        await asyncio.to_thread(killed.source.close)
        calls = len(worker.calls)

        again = make_rig(at, worker, run_id=killed.run_id, steps=4, deterministic=True)
        await again.start(1, cursor)
        repeated = await again.take(1)
        assert [g.SerializeToString() for g in repeated.groups] == [g.SerializeToString() for g in lost.groups]
        await again.trained(2)
        assert [g.group_id for g in (await again.take(2)).groups] == ["g00000004", "g00000005"]
        fresh = [call.group_id for call in worker.calls[calls:]]
        assert set(fresh) <= {"g00000004", "g00000005"}


async def test_a_group_older_than_the_bound_is_replaced(make_rig, redis_url, tmp_path):
    worker = worker_of(redis_url, tmp_path)
    async with fleet(worker) as at:
        rig = make_rig(at, worker, steps=5)
        stale = ScoredGroup(run_id=rig.run_id, group_id="g00000000")
        stale.samples.add(first_step_version=WeightVersion(run_id=rig.run_id, step=1))
        publisher = ScoredPublisher(redis_url)
        await publisher.publish(stale)
        await publisher.close()
        worker.version = WeightVersion(run_id=rig.run_id, step=3)
        await at.beat(worker)
        await rig.start(3, Cursor(next_sequence=1, outstanding=[0]))
        batch = await rig.take(3)
        assert [group.group_id for group in batch.groups] == ["g00000001", "g00000002"]
        assert "GROUP_GIVEN_UP" in rig.notices


async def test_signals_come_before_groups(make_rig, redis_url, tmp_path):
    worker = worker_of(redis_url, tmp_path)
    async with fleet(worker) as at:
        rig = make_rig(at, worker)
        await rig.start()
        rig.asked.append(Signal.SAVE)
        assert await rig.take() is Signal.SAVE
        assert isinstance(await rig.take(), GroupBatch)


async def test_without_workers_a_person_is_told(make_rig, redis_url, tmp_path):
    async with fleet() as at:
        rig = make_rig(at, ScriptedWorker("absent"))
        await rig.start()
        async with asyncio.timeout(DEADLINE_S):
            while "NO_WORKERS" not in rig.notices:
                await asyncio.sleep(0.05)
