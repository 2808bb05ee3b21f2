"""The stream against a real Valkey: published once, delivered at least once, given up after three failures."""

import asyncio
import socket
import time

import pytest
import redis

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.errors import InvalidArgument, Unavailable
from headwater.stream.connection import Timeouts
from headwater.stream.publisher import ScoredPublisher
from headwater.stream.scored import ScoredStream


def group(run_id, name, **fields):
    return ScoredGroup(run_id=run_id, group_id=name, prompt="a red circle", **fields)


def publish(url, *groups):
    async def main():
        publisher = ScoredPublisher(url)
        try:
            return [await publisher.publish(g) for g in groups]
        finally:
            await publisher.close()

    return asyncio.run(main())


def test_publish_is_idempotent_under_concurrency(redis_url, run_id):
    async def main():
        publishers = [ScoredPublisher(redis_url) for _ in range(4)]
        results = await asyncio.gather(*(p.publish(group(run_id, "g")) for p in publishers for _ in range(5)))
        assert await publishers[0].is_published(run_id, "g")
        assert not await publishers[0].is_published(run_id, "other")
        for publisher in publishers:
            await publisher.close()
        return results

    assert sum(asyncio.run(main())) == 1
    stream = ScoredStream(redis_url, run_id)
    (entry,) = stream.read(10)
    assert entry.group.prompt == "a red circle"
    stream.ack([entry.id])
    assert publish(redis_url, group(run_id, "g")) == [False]  # trained groups stay known
    assert stream.length() == 0


def test_a_publish_whose_reply_was_lost_still_counts_as_its_own(redis_url, run_id, monkeypatch):
    async def main():
        publisher = ScoredPublisher(redis_url)
        real, lost = publisher._redis.eval, []

        async def lossy(*args):
            reply = await real(*args)
            if not lost:
                lost.append(reply)
                raise redis.exceptions.TimeoutError("injected: reply lost")
            return reply

        monkeypatch.setattr(publisher._redis, "eval", lossy)
        first = await publisher.publish(group(run_id, "g"))
        second = await publisher.publish(group(run_id, "g"))
        await publisher.close()
        return lost, first, second

    assert asyncio.run(main()) == ([1], True, False)
    assert ScoredStream(redis_url, run_id).length() == 1


def test_pending_entries_come_first_after_a_restart(redis_url, run_id):
    publish(redis_url, *(group(run_id, f"g{i}") for i in range(4)))
    first = ScoredStream(redis_url, run_id)
    got = first.read(3)
    first.ack([got[0].id])
    first.close()  # killed with g1 and g2 unacknowledged
    second = ScoredStream(redis_url, run_id)
    names = []
    for _ in range(3):
        names += [entry.group.group_id for entry in second.read(2)]
    assert names == ["g1", "g2", "g3"]
    assert second.read(10) == []
    assert second.pending() == 3


def test_a_lost_reply_does_not_lose_entries(redis_url, run_id, monkeypatch):
    stream = ScoredStream(redis_url, run_id)
    publish(redis_url, group(run_id, "g0"))
    assert len(stream.read(1)) == 1
    publish(redis_url, group(run_id, "g1"))
    real, lost = stream._xreadgroup, []

    def lossy(count, start, block_ms):
        reply = real(count, start, block_ms)
        if start == ">" and not lost:
            lost.append(reply)
            raise redis.exceptions.TimeoutError("injected: reply lost")
        return reply

    monkeypatch.setattr(stream, "_xreadgroup", lossy)
    assert [entry.group.group_id for entry in stream.read(5)] == ["g1"]
    assert lost[0]
    assert stream.read(5) == []


def test_a_blocking_read_returns_when_something_arrives(redis_url, run_id):
    stream = ScoredStream(redis_url, run_id)
    started = time.monotonic()
    assert stream.read(1, block_s=0.3) == []
    assert 0.25 < time.monotonic() - started < 3
    publish(redis_url, group(run_id, "g"))
    assert len(stream.read(1, block_s=30)) == 1


def test_undecodable_entries_die_with_a_reason(redis_url, run_id):
    raw = redis.Redis.from_url(redis_url)
    raw.xadd(f"hw:{run_id}:scored", {"group": "bad", "data": b"\xff\xff\xff"})
    publish(redis_url, group(run_id, "good"))
    stream = ScoredStream(redis_url, run_id)
    names = []
    for _ in range(5):
        names += [entry.group.group_id for entry in stream.read(10)]
    assert names == ["good"]
    assert stream.take_dead_group_ids() == ["bad"]
    assert stream.take_dead_group_ids() == []
    (dead,) = stream.dead()
    assert dead.group_id == "bad"
    assert "cannot be decoded" in dead.reason
    assert stream.pending() == 1
    assert raw.hlen(f"hw:{run_id}:failures") == 0


def test_unusable_groups_are_retried_and_die_at_the_third_failure(redis_url, run_id):
    publish(redis_url, group(run_id, "g"))
    died = []
    for _ in range(3):  # a restart between the failures does not reset the count
        stream = ScoredStream(redis_url, run_id)
        (entry,) = stream.read(10)
        died.append(stream.fail(entry, "blob is damaged"))
        stream.close()
    assert died == [False, False, True]
    stream = ScoredStream(redis_url, run_id)
    assert [d.reason for d in stream.dead()] == ["blob is damaged"]
    assert stream.read(10) == []
    assert stream.pending() == 0


def test_an_entry_that_somebody_deleted_dies(redis_url, run_id):
    publish(redis_url, group(run_id, "g"))
    stream = ScoredStream(redis_url, run_id)
    (entry,) = stream.read(1)
    redis.Redis.from_url(redis_url).xdel(f"hw:{run_id}:scored", entry.id)
    again = ScoredStream(redis_url, run_id)
    for _ in range(3):
        assert again.read(1) == []
    assert "deleted or trimmed" in again.dead()[0].reason


def test_a_server_that_lost_its_data_is_joined_again(redis_url, run_id):
    stream = ScoredStream(redis_url, run_id)
    stream.open()
    redis.Redis.from_url(redis_url).delete(f"hw:{run_id}:scored")
    assert stream.read(1) == []
    publish(redis_url, group(run_id, "g"))
    assert len(stream.read(1)) == 1


def test_large_entries_and_bad_ids_are_refused(redis_url, run_id):
    with pytest.raises(InvalidArgument, match="65536"):
        publish(redis_url, ScoredGroup(run_id=run_id, group_id="g", prompt="x" * 70_000))
    for bad in ("", "a b", "../x", "x" * 200):
        with pytest.raises(InvalidArgument) as caught:
            publish(redis_url, group(bad, "g"))
        assert caught.value.field == "run_id"
        with pytest.raises(InvalidArgument) as caught:
            publish(redis_url, group(run_id, bad))
        assert caught.value.field == "group_id"


def test_an_unreachable_redis_says_where_and_what_to_do(run_id):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"redis://:secret@127.0.0.1:{port}"
    fast = Timeouts(connect_s=1, command_s=1, retry_s=0.5)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.*REDIS_URL") as caught:
        ScoredStream(url, run_id, timeouts=fast).read(1, block_s=60)
    assert "secret" not in str(caught.value)

    async def send():
        await ScoredPublisher(url, fast).publish(group(run_id, "g"))

    with pytest.raises(Unavailable, match="does not answer"):
        asyncio.run(send())
    assert time.monotonic() - started < 5


def test_a_silent_redis_does_not_hang(run_id):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match="does not answer"):
            ScoredStream(url, run_id, timeouts=Timeouts(connect_s=1, command_s=0.5, retry_s=0.2)).open()


def test_a_bad_url_is_an_invalid_argument(run_id):
    with pytest.raises(InvalidArgument, match="redis://host:port"):
        ScoredStream("localhost:6379", run_id)
