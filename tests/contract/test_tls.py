"""TLS over real gRPC: who is let in, and what those are told who are not."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from identities import identity, make

from headwater.errors import HeadwaterError, InvalidArgument
from headwater.router.v1 import router_pb2, router_pb2_grpc
from headwater.rpc.channel import WORKER_NAME, aio_channel
from headwater.rpc.errors import from_rpc_error
from headwater.rpc.security import PLAIN, Security
from headwater.rpc.server import Server


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """Of another CA."""
    return make(tmp_path_factory.mktemp("others"))


class Router(router_pb2_grpc.RouterServiceServicer):
    async def GetStatus(self, request, context):
        return router_pb2.GetStatusResponse(queue_capacity=7)


async def ask(server: Security, client: Security, server_name: str = "") -> HeadwaterError | None:
    """What a client of this identity hears from a server of that one."""
    listening = Server("127.0.0.1:0", name="router", security=server)
    listening.add(router_pb2_grpc.add_RouterServiceServicer_to_server, Router(), "headwater.router.v1.RouterService")
    address = await listening.start()
    try:
        async with aio_channel(address, security=client, server_name=server_name) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            assert (await stub.GetStatus(router_pb2.GetStatusRequest(), timeout=10)).queue_capacity == 7
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    finally:
        await listening.stop(0)
    return None


async def test_certificate_and_token_of_the_same_folder_are_let_in(files):
    assert await ask(identity(files, "router"), identity(files, "client", "client")) is None
    assert await ask(identity(files, "rollout"), identity(files, "router", "worker"), WORKER_NAME) is None


async def test_tls_without_a_client_certificate_is_possible_where_the_server_has_no_ca(files):
    server = dataclasses.replace(identity(files, "router"), tls_ca="")
    client = Security(tls_ca=str(files / "ca.crt"), token_file=str(files / "client.token"))
    assert await ask(server, client) is None


async def test_who_is_not_let_in_hears_what_to_do(files, others):
    server, client = identity(files, "router"), identity(files, "client", "client")
    foreign = dataclasses.replace(identity(others, "client", "client"), tls_ca=str(files / "ca.crt"))
    cases = {
        "plain text": (server, PLAIN, "", "TLS_REFUSED", "--tls-ca"),
        "no certificate": (server, Security(tls_ca=str(files / "ca.crt")), "", "TLS_REFUSED", "--tls-cert"),
        "certificate of another CA": (server, foreign, "", "TLS_REFUSED", "--tls-cert"),
        "another CA expected": (server, identity(others, "client"), "", "TLS_UNTRUSTED", "ca.crt"),
        "router in place of a worker": (server, client, WORKER_NAME, "TLS_WRONG_NAME", "--host NAME"),
        "client's certificate on a server": (identity(files, "client"), client, "", "TLS_UNTRUSTED", "ca.crt"),
        "TLS to plain text": (PLAIN, client, "", "TLS_NOT_SPOKEN", "--tls-ca"),
    }
    for name, (of_server, of_client, server_name, reason, remedy) in cases.items():
        error = await ask(of_server, of_client, server_name)
        assert error is not None, name
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, reason), (name, error)
        assert remedy in error.message, name


async def test_an_address_that_the_certificate_does_not_name_is_refused(tmp_path):
    files = make(tmp_path / "certs", hosts=("gpu7.example.org",))
    client = identity(files, "client", "client")
    assert await ask(identity(files, "router"), client, "gpu7.example.org") is None
    error = await ask(identity(files, "router"), client, "gpu8.example.org")
    assert error is not None
    assert error.reason == "TLS_WRONG_NAME"


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"tls_cert": "c"}, "tls_cert", "--tls-key"),
        ({"tls_ca": "c"}, "tls_cert", "--tls-cert"),
        ({"tokens": "t"}, "tls_cert", "--tls-cert"),
        ({"tls_cert": "router.crt", "tls_key": "missing.key"}, "tls_key", "cannot be read"),
        ({"tls_cert": "router.key", "tls_key": "router.key"}, "tls_cert", "PEM"),
        ({"tls_cert": "router.crt", "tls_key": "router.key", "tokens": "ca.crt"}, "", "no list of tokens"),
    ],
)
def test_settings_that_cannot_be_are_named(files, settings, field, words):
    given = Security(**{key: str(files / value) for key, value in settings.items()})
    with pytest.raises(InvalidArgument, match=words) as caught:
        Server("127.0.0.1:0", name="x", security=given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token_file": "client.token"}, "needs TLS"),
        ({"tls_ca": "ca.crt", "token_file": "ca.crt"}, "holds no token"),
        ({"tls_ca": "ca.crt", "token_file": "missing"}, "cannot be read"),
        ({"tls_ca": "ca.key"}, "holds no certificate"),
    ],
)
async def test_a_client_with_settings_that_cannot_be_is_told_at_once(files, settings, words):
    given = Security(**{key: str(files / value) for key, value in settings.items()})
    with pytest.raises(InvalidArgument, match=words):
        aio_channel("127.0.0.1:1", security=given)


COMMANDS = {
    "router": ["headwater_router"],
    "reward": ["headwater_reward", "--rewards", "color_shape"],
    "rollout": ["headwater_rollout", "--model", "none", "--engine", "diffusers"],
    "trainer": ["headwater_trainer", "--blob-root", "b", "--output-dir", "o"],
    "dashboard": ["headwater_dashboard"],
}


@pytest.mark.parametrize("service", COMMANDS)
@pytest.mark.parametrize("given", ["nothing", "TLS"])
def test_a_public_bind_without_tls_and_tokens_does_not_start(files, tmp_path, service, given):
    flags = identity(files, service).flags() if given == "TLS" else ()
    flags = tuple(word for word in flags if word != "--tokens" and not word.endswith("tokens.toml"))
    done = subprocess.run(
        [sys.executable, "-m", *COMMANDS[service], "--bind", "0.0.0.0:0", *flags],
        cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stderr
    assert "--insecure" in done.stderr
    assert "reachable from other machines" in done.stderr
    assert "Traceback" not in done.stderr
