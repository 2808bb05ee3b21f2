"""The mapping between our errors and gRPC status, over a real server."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.errors import FailedPrecondition, HeadwaterError, Internal, InvalidArgument, OutOfBudget
from headwater.reward.v1 import reward_pb2 as pb
from headwater.reward.v1 import reward_pb2_grpc as rpc
from headwater.rpc.channel import aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater.rpc.security import PLAIN
from headwater.rpc.server import Server, check_bind


class Raising(rpc.RewardServiceServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def ListRewards(self, request, context):
        raise self.error


async def call(error: Exception) -> HeadwaterError:
    server = Server("127.0.0.1:0", name="test")
    server.add(rpc.add_RewardServiceServicer_to_server, Raising(error), "headwater.reward.v1.RewardService")
    address = await server.start()
    try:
        async with aio_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc.RewardServiceStub(channel).ListRewards(pb.ListRewardsRequest(), timeout=5)
            return from_rpc_error(caught.value)
    finally:
        await server.stop(0)


async def test_field_reason_and_message_survive_the_wire():
    error = await call(InvalidArgument("prompt is empty; give a text", field="prompt.text", reason="PROMPT_EMPTY"))
    assert type(error) is InvalidArgument
    assert (error.field, error.reason, error.message) == (
        "prompt.text", "PROMPT_EMPTY", "prompt is empty; give a text",
    )  # fmt: skip


async def test_retry_delay_survives_the_wire():
    error = await call(OutOfBudget("the queue is full", retry_after_s=1.5))
    assert type(error) is OutOfBudget
    assert error.retry_after_s == 1.5


async def test_an_unexpected_exception_is_internal_and_names_its_type():
    error = await call(ZeroDivisionError("boom"))
    assert type(error) is Internal
    assert "ZeroDivisionError" in error.message


async def test_every_error_class_comes_back_as_itself():
    for cls in HeadwaterError.__subclasses__():
        assert type(await call(cls("x"))) is cls


async def test_health_follows_set_serving():
    server = Server("127.0.0.1:0", name="test")
    address = await server.start()
    async with aio_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        before = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        await server.set_serving(True)
        after = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    await server.stop(0)
    assert (before.status, after.status) == (2, 1)


@pytest.mark.parametrize("bind", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "example.com:1", "7400", ":7400"])
def test_public_or_malformed_binds_are_refused(bind):
    with pytest.raises(InvalidArgument):
        check_bind(bind, PLAIN, insecure=False)


def test_insecure_allows_a_public_bind():
    check_bind("0.0.0.0:7400", PLAIN, insecure=True)
    check_bind("[::1]:7400", PLAIN, insecure=False)
    assert issubclass(FailedPrecondition, HeadwaterError)
