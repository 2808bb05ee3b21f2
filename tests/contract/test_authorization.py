"""Who may call what, over real gRPC with TLS: every method of the protocol, found in the descriptors."""

import asyncio
import hashlib
import importlib
import logging
from pathlib import Path

import grpc
import pytest
import rpcs
import tomli_w
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from headwater_router.config import RouterConfig
from headwater_router.service import SERVICE, RouterService
from identities import identity, make

from headwater.common.v1.authorization_pb2 import Role
from headwater.errors import PermissionDenied, Unauthenticated
from headwater.router.v1 import router_pb2, router_pb2_grpc
from headwater.rpc.authorization import role_of
from headwater.rpc.channel import aio_channel, sync_channel
from headwater.rpc.errors import from_rpc_error
from headwater.rpc.server import Server

METHODS = rpcs.methods()
ROLES = ("client", "worker", "admin")
NEEDED = {Role.ROLE_CLIENT: "client", Role.ROLE_WORKER: "worker", Role.ROLE_ADMIN: "admin"}
PASSED = grpc.StatusCode.INTERNAL
"""How a method without an implementation answers whoever gets past the guard."""
WRONG = "not-a-token-that-anybody-was-given-0000000"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("certs"))


def token(files: Path, role: str) -> str:
    return (files / f"{role}.token").read_text().strip()


class AllServices:
    """One server with every service of the protocol. Behind the guard each method answers `PASSED`."""

    def __init__(self, security) -> None:
        self.server = Server("127.0.0.1:0", name="all", security=security)
        for service in {method.containing_service for method in METHODS}:
            module = importlib.import_module(service.file.name.removesuffix(".proto").replace("/", ".") + "_pb2_grpc")
            servicer = getattr(module, f"{service.name}Servicer")()
            self.server.add(getattr(module, f"add_{service.name}Servicer_to_server"), servicer, service.full_name)

    async def __aenter__(self) -> str:
        return await self.server.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.server.stop(0)


def test_every_method_declares_a_role():
    assert len(METHODS) >= 28
    assert [rpcs.path_of(m) for m in METHODS if role_of(rpcs.path_of(m)) not in NEEDED] == []


async def test_every_method_refuses_a_missing_a_wrong_and_a_wrong_role_token(files):
    def check(address: str) -> None:
        with sync_channel(address, security=identity(files, "client")) as channel:
            for method in METHODS:
                path, needed = rpcs.path_of(method), NEEDED[role_of(rpcs.path_of(method))]
                missing, wrong = rpcs.call(channel, method, None), rpcs.call(channel, method, WRONG)
                assert (type(missing), missing.reason) == (Unauthenticated, "TOKEN_MISSING"), path
                assert (type(wrong), wrong.reason) == (Unauthenticated, "TOKEN_UNKNOWN"), path
                assert "--token-file" in missing.message
                assert "--token-file" in wrong.message
                for role in ROLES:
                    error = rpcs.call(channel, method, token(files, role))
                    if ROLES.index(role) < ROLES.index(needed):
                        assert (type(error), error.reason) == (PermissionDenied, "ROLE_TOO_SMALL"), (path, role)
                        assert f"needs the role {needed}" in error.message
                    else:
                        assert error.code == PASSED, (path, role, error)

    async with AllServices(identity(files, "local")) as address:
        await asyncio.to_thread(check, address)


async def test_health_is_open_and_reflection_is_not(files):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with AllServices(identity(files, "router")) as address:
        async with aio_channel(address, security=identity(files, "client")) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo([request])))
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        async with aio_channel(address, security=identity(files, "client", "client")) as channel:
            calls = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo([request])
            answer = await anext(aiter(calls))
            assert len(answer.list_services_response.service) >= 4


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic {token}", "{token}", "Bearer {token} x"])
async def test_a_malformed_header_is_no_token(files, header):
    metadata = [("authorization", header.format(token=token(files, "admin")))]
    async with (
        AllServices(identity(files, "router")) as address,
        aio_channel(address, security=identity(files, "client")) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_pb2_grpc.RouterServiceStub(channel).GetStatus(
                router_pb2.GetStatusRequest(), metadata=metadata, timeout=5
            )
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def status_code(address: str, security) -> grpc.StatusCode:
    async with aio_channel(address, security=security) as channel:
        try:
            await router_pb2_grpc.RouterServiceStub(channel).GetStatus(router_pb2.GetStatusRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_tokens_change_while_the_server_runs_and_a_broken_list_changes_nothing(tmp_path):
    files = make(tmp_path / "certs")
    client, listing, own = identity(files, "client", "client"), files / "tokens.toml", files / "client.token"
    known, unknown = PASSED, grpc.StatusCode.UNAUTHENTICATED
    async with AllServices(identity(files, "router")) as address, aio_channel(address, security=client) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def code() -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(router_pb2.GetStatusRequest(), timeout=5)
            return caught.value.code()

        assert await code() == known
        fresh = "a-new-token-of-sufficient-length"
        row = {"name": "new", "role": "client", "sha256": hashlib.sha256(fresh.encode()).hexdigest()}
        listing.write_text(tomli_w.dumps({"token": [row]}))
        assert await code() == unknown
        own.write_text(fresh + "\n")  # the open channel presents it from now on
        assert await code() == known
        for broken in ("", "token = 3", '[[token]]\nname = "x"\nrole = "king"\nsha256 = "00"', "[[token"):
            listing.write_text(broken)
            assert await code() == known
        listing.unlink()
        assert await code() == known


async def test_tokens_are_in_no_log_and_no_error(files, caplog):
    caplog.set_level(logging.DEBUG)
    admin = token(files, "admin")
    async with AllServices(identity(files, "router")) as address:
        assert await status_code(address, identity(files, "client", "admin")) == PASSED
        async with aio_channel(address, security=identity(files, "client")) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router_pb2_grpc.RouterServiceStub(channel).GetStatus(
                    router_pb2.GetStatusRequest(), metadata=[("authorization", f"Bearer {WRONG}")], timeout=5
                )
    assert "refused /headwater.router.v1.RouterService/GetStatus" in caplog.text
    for secret in (admin, WRONG):
        assert secret not in caplog.text
        assert secret not in str(caught.value)


async def test_a_client_cannot_spend_the_budget_of_a_run_or_write_into_its_stream(files):
    server, service = Server("127.0.0.1:0", name="router", security=identity(files, "router")), None
    service = RouterService(RouterConfig())
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, service, SERVICE)
    address = await server.start()
    prompt = router_pb2.Prompt(run_id="run-1", text="a red circle", sample_count=1)
    prompt.sampling.steps, prompt.sampling.height_px, prompt.sampling.width_px = 2, 64, 64
    prompt.timeout.seconds = 1
    errors = {}
    try:
        for role in ("client", "admin"):
            async with aio_channel(address, security=identity(files, "client", role)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await router_pb2_grpc.RouterServiceStub(channel).SubmitPrompt(
                        router_pb2.SubmitPromptRequest(prompt=prompt), timeout=10
                    )
                errors[role] = from_rpc_error(caught.value)
    finally:
        await server.stop(0)
        await service.close()
    assert (errors["client"].reason, errors["client"].field) == ("ROLE_TOO_SMALL", "prompt.run_id")
    assert errors["admin"].code == grpc.StatusCode.UNAVAILABLE, "no worker: admitted, and too late"
