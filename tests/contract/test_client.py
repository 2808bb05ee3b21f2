"""The Python client against a real router and scripted workers."""

import asyncio
import contextlib
import inspect
import io
import re
import textwrap

import pytest
from PIL import Image
from router_fleet import ScriptedWorker, fail_with, finish, fleet, wait_for_gate

import headwater.client
from headwater.client import Client, WeightVersion
from headwater.common.v1.reward_pb2 import RewardSpec
from headwater.common.v1.sampling_pb2 import TransitionKind
from headwater.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, OutOfBudget, Unavailable


def png():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(buffer, "PNG")
    return buffer.getvalue()


async def in_thread(f, use, *args):
    """Run `use(client, *args)` in a thread, as a program that is not ours would."""

    def work():
        with Client(f.address) as client:
            return use(client, *args)

    async with asyncio.timeout(30):
        return await asyncio.to_thread(work)


async def test_submit_returns_images_scores_and_weights():
    async with fleet(worker := ScriptedWorker("w1", step=3, media=png())) as f:
        group = await in_thread(
            f, lambda client: client.submit("a red circle", n=2, rewards=["color_shape"], steps=5, noise_level=0.7)
        )
        assert (group.prompt, len(group.samples), group.worker_id, group.error) == ("a red circle", 2, "w1", None)
        sample = group.samples[1]
        assert sample.image.size == (8, 4)
        assert sample.seed == worker.calls[0].seeds[1]
        assert (sample.rewards, sample.total_reward) == ({"color_shape": 0.5}, 0.5)
        assert sample.weight_version == WeightVersion("run", 3)
        sent = worker.calls[0]
        assert (sent.sampling.steps, sent.sampling.height_px, sent.sampling.width_px) == (5, 64, 64)
        assert sent.sampling.transition.kind == TransitionKind.TRANSITION_KIND_SDE
        assert [reward.name for reward in sent.rewards] == ["color_shape"]


async def test_options_reach_the_worker():
    async with fleet(worker := ScriptedWorker("w1", step=2)) as f:

        def use(client):
            client.submit(
                "x", seeds=[7, 8], rewards={"ocr": 2.0}, guidance_scale=4.5, negative_prompt="blur", height_px=32,
                width_px=48, metadata={"shape": "circle"}, return_media=False,
                min_weight_version=WeightVersion("run", 2),
            )  # fmt: skip
            return client.submit("y", rewards=[RewardSpec(name="ocr")])

        await in_thread(f, use)
        sent = worker.calls[0]
        assert list(sent.seeds) == [7, 8]
        assert (sent.rewards[0].name, sent.rewards[0].weight) == ("ocr", 2.0)
        assert (sent.sampling.guidance_scale, sent.sampling.negative_prompt) == (4.5, "blur")
        assert (sent.sampling.height_px, sent.sampling.width_px) == (32, 48)
        assert dict(sent.metadata) == {"shape": "circle"}
        assert not sent.return_media
        assert sent.min_weight_version.step == 2
        assert not worker.calls[1].HasField("min_weight_version")
        assert not worker.calls[1].sampling.HasField("guidance_scale")


async def test_a_stream_yields_every_prompt_and_errors_as_results():
    async with fleet(ScriptedWorker("w1", capacity=2)) as f:
        prompts = [f"prompt {i}" if i != 5 else "" for i in range(20)]
        groups = await in_thread(f, lambda client: list(client.stream(prompts, max_in_flight=4)))
        assert sorted(group.prompt for group in groups) == sorted(prompts)
        (failed,) = [group for group in groups if group.error is not None]
        assert isinstance(failed.error, InvalidArgument)
        assert failed.error.field == "prompt.text"


async def test_a_stream_keeps_to_its_window_and_reads_prompts_lazily():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate, wait_for_gate, capacity=8)) as f:
        taken = []

        def prompts():
            for i in range(6):
                taken.append(i)
                yield f"prompt {i}"

        def use(client):
            return [group.prompt for group in client.stream(prompts(), max_in_flight=2)]

        streaming = asyncio.ensure_future(in_thread(f, use))
        status = await f.wait_for(lambda status: status.running_prompts >= 2)
        assert (status.running_prompts, taken) == (2, [0, 1])
        worker.gate.set()
        assert sorted(await streaming) == [f"prompt {i}" for i in range(6)]


async def test_a_refused_prompt_is_submitted_again_by_stream_and_told_by_submit():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate), queue_capacity=1) as f:
        streaming = asyncio.ensure_future(in_thread(f, lambda client: list(client.stream(["a", "b", "c"]))))
        await f.wait_for(lambda status: status.queued_prompts == 1)
        with pytest.raises(OutOfBudget) as caught:
            await in_thread(f, lambda client: client.submit("d"))
        assert caught.value.retry_after_s is not None
        worker.gate.set()
        groups = await streaming
        assert [group.error for group in groups] == [None] * 3
        assert len(worker.calls) == 3


async def test_leaving_the_loop_cancels_what_is_running():
    async with fleet(worker := ScriptedWorker("w1", finish, wait_for_gate, capacity=1)) as f:

        def use(client):
            with contextlib.closing(client.stream(["a", "b", "c"])) as groups:
                return next(groups)

        await in_thread(f, use)
        await f.wait_for(lambda status: status.running_prompts == status.queued_prompts == 0)
        assert len(worker.calls) <= 2


async def test_errors_of_the_worker_and_of_the_caller_are_raised():
    error = FailedPrecondition("no reward server", reason="REWARD_NO_SERVER")
    async with fleet(ScriptedWorker("w1", fail_with(error))) as f:
        with pytest.raises(FailedPrecondition, match="no reward server"):
            await in_thread(f, lambda client: client.submit("x"))
        with pytest.raises(InvalidArgument) as caught:
            await in_thread(f, lambda client: client.submit("x", height_px=65))
        assert caught.value.field == "prompt.sampling.height_px"
        with pytest.raises(TypeError, match="give a list"):
            await in_thread(f, lambda client: client.submit("x", rewards="ocr"))
        with pytest.raises(TypeError, match="unknown option 'heigth_px'"):
            await in_thread(f, lambda client: client.submit("x", heigth_px=64))


async def test_status_and_cancel():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        submission = asyncio.ensure_future(in_thread(f, lambda client: client.submit("x")))
        await f.wait_for(lambda status: status.running_prompts == 1)
        status = await in_thread(f, lambda client: client.status())
        assert status.workers[0].worker_id == "w1"
        assert await in_thread(f, lambda client: client.cancel(worker.calls[0].group_id))
        with pytest.raises(Cancelled):
            await submission
        with pytest.raises(NotFound):
            await in_thread(f, lambda client: client.cancel("never-seen"))


def test_without_a_router_the_error_says_how_to_start_one(monkeypatch):
    monkeypatch.setenv("HEADWATER_ROUTER", "127.0.0.1:9")
    with Client() as client:
        assert client.address == "127.0.0.1:9"
        for use in (client.status, lambda: client.submit("x"), lambda: list(client.stream(["x"]))):
            with pytest.raises(Unavailable, match="headwater up"):
                use()


async def test_a_router_that_goes_away_ends_the_stream_with_an_error():
    async with fleet(worker := ScriptedWorker("w1", wait_for_gate)) as f:
        streaming = asyncio.ensure_future(in_thread(f, lambda client: list(client.stream(["a", "b"]))))
        async with asyncio.timeout(20):
            await worker.called.wait()
            await f.service._prompts.drain(0.1)
            groups = await streaming
        assert [group.error.reason for group in groups] == ["DRAINING"] * 2


async def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    text = inspect.getdoc(headwater.client)
    example = textwrap.dedent(text[text.index("    from headwater.client") : text.index("Every failure")])
    assert len(example.strip().splitlines()) <= 15
    async with fleet(ScriptedWorker("w1", media=png(), step=1)) as f:
        monkeypatch.chdir(tmp_path)
        code, replaced = re.subn(r"127\.0\.0\.1:7400", f.address, example)
        assert replaced == 1
        async with asyncio.timeout(30):
            await asyncio.to_thread(exec, compile(code, "example", "exec"), {})
    assert Image.open(tmp_path / "best.png").size == (8, 4)
    printed = capsys.readouterr().out
    assert "{'color_shape': 0.5}" in printed
    assert "a green triangle [0.5, 0.5]" in printed
