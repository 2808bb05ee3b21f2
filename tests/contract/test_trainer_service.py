"""The trainer process over real gRPC: what it refuses, and how it ends."""

import signal
import subprocess
import sys
import uuid

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.errors import FailedPrecondition, InvalidArgument, NotFound
from headwater.rpc.channel import sync_channel
from headwater.rpc.errors import from_rpc_error
from headwater.trainer.v1 import trainer_pb2 as pb
from headwater.trainer.v1.trainer_pb2_grpc import TrainerServiceStub

START_S, CALL_S = 90.0, 30.0
RECIPE = """
[model]
path = "{model}"
[sampling]
steps = 4
height_px = {side}
width_px = 64
[prompts]
texts = ["a red circle"]
[[rewards]]
name = "color_shape"
[train]
steps = 2
groups_per_step = 1
group_size = 2
[lora]
targets = ["{target}"]
"""


class TrainerProcess:
    def __init__(self, folder, redis_url, router="127.0.0.1:9"):
        self.log = folder / "trainer.log"
        command = [
            sys.executable, "-m", "headwater_trainer", "--bind", "127.0.0.1:0", "--router", router,
            "--redis", redis_url,
            "--blob-root", str(folder / "blobs"), "--output-dir", str(folder / "out"), "--device", "cpu",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=self.log.open("w"))
        self.channel = sync_channel(self._address())
        self.stub = TrainerServiceStub(self.channel)

    def _address(self):
        import time

        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            for line in self.log.read_text().splitlines():
                if "trainer listens on " in line:
                    return line.rpartition(" ")[2]
            time.sleep(0.1)
        raise AssertionError("the trainer did not start:\n" + self.log.read_text())

    def close(self):
        self.channel.close()
        self.process.kill()
        self.process.wait(CALL_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from headwater.diffusion import tiny_sd3

    return tiny_sd3.build(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3-medium")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, redis_server):
    process = TrainerProcess(tmp_path_factory.mktemp("trainer"), redis_server)
    yield process
    process.close()


def start(trainer, text, run_id=None):
    request = pb.StartRunRequest(run_id=f"run-{uuid.uuid4().hex[:8]}" if run_id is None else run_id, recipe_toml=text)
    try:
        return trainer.stub.StartRun(request, timeout=CALL_S).run
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


def recipe(model, side=64, target="attn.to_q"):
    return RECIPE.format(model=model, side=side, target=target)


def end_of(trainer, run_id):
    """The last state of a run and all its notices."""
    events = trainer.stub.WatchRun(pb.WatchRunRequest(run_id=run_id), timeout=START_S)
    events = list(events)
    return events[-1].run, [event.notice for event in events if event.WhichOneof("event") == "notice"]


def test_it_is_healthy_and_has_no_run_yet(trainer):
    health = health_pb2_grpc.HealthStub(trainer.channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        trainer.stub.GetRun(pb.GetRunRequest(run_id="never"), timeout=CALL_S)
    assert isinstance(from_rpc_error(caught.value), NotFound)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (("[train]", "[trian]"), "trian", "train"),
        (("groups_per_step = 1", "groups_per_stp = 1"), "train.groups_per_stp", "train.groups_per_step"),
        (("steps = 4", "steps = 4\nwindow_size = 9"), "sampling.window_size", "window"),
        (('texts = ["a red circle"]', 'texts = [""]'), "prompts.texts", "prompts.texts"),
        (('path = "', 'path = "/nowhere'), "model.path", "does not exist"),
    ],
)
def test_a_wrong_recipe_is_refused_naming_the_key(change, field, words, trainer, model):
    text = recipe(model)
    assert change[0] in text
    with pytest.raises(InvalidArgument, match=words) as caught:
        start(trainer, text.replace(*change, 1))
    assert caught.value.field.startswith(field)


def test_an_image_size_that_the_vae_cannot_make_is_refused(trainer, model):
    with pytest.raises(InvalidArgument, match=r"use a multiple of 16, e\.g\. 64"):
        start(trainer, recipe(model, side=60))


@pytest.mark.parametrize("run_id", ["", "a/b", "x" * 65])
def test_a_bad_run_id_is_refused(run_id, trainer, model):
    with pytest.raises(InvalidArgument, match="run_id") as caught:
        start(trainer, recipe(model), run_id)
    assert caught.value.field == "run_id"


def test_a_run_without_a_router_fails_and_says_so(trainer, model):
    run = start(trainer, recipe(model), "no-router")
    with pytest.raises(FailedPrecondition, match="no-router"):
        start(trainer, recipe(model), "another")
    assert start(trainer, recipe(model), "no-router").run_id == run.run_id  # idempotent
    end, _ = end_of(trainer, "no-router")
    assert end.state == pb.RunState.RUN_STATE_FAILED
    assert "weights of step 0" in end.error
    assert "127.0.0.1:9" in end.error


def test_lora_targets_that_bind_nothing_fail_the_run_by_name(trainer, model):
    run = start(trainer, recipe(model, target="attn.nothing"))
    end, _ = end_of(trainer, run.run_id)
    assert end.state == pb.RunState.RUN_STATE_FAILED
    assert "'attn.nothing' matches no layer" in end.error
    assert "to_q" in end.error


def test_a_save_of_an_ended_run_is_refused(trainer):
    with pytest.raises(grpc.RpcError) as caught:
        trainer.stub.SaveCheckpoint(pb.SaveCheckpointRequest(run_id="no-router"), timeout=CALL_S)
    assert isinstance(from_rpc_error(caught.value), FailedPrecondition)


def test_without_redis_a_run_fails_at_once_and_sigterm_ends_the_process(tmp_path, model):
    trainer = TrainerProcess(tmp_path, "redis://127.0.0.1:9/0")
    try:
        run = start(trainer, recipe(model))
        end, _ = end_of(trainer, run.run_id)
        assert end.state == pb.RunState.RUN_STATE_FAILED
        assert "Redis at 127.0.0.1:9 does not answer" in end.error
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.process.wait(CALL_S) == 0
    finally:
        trainer.close()


def test_help_is_quick_because_torch_is_not_imported():
    code = (
        "import sys; from headwater_trainer.config import parse_args\n"
        "try: parse_args(['--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=CALL_S, check=False).returncode
        == 0
    )
