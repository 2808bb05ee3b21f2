"""The writing end of the stream of scored groups, for asyncio."""

import asyncio
import time
import uuid

from redis.exceptions import RedisError

from headwater.common.v1.sample_pb2 import ScoredGroup
from headwater.errors import InvalidArgument
from headwater.stream.connection import RETRYABLE, Timeouts, async_client, explain
from headwater.stream.keys import MAX_ENTRY_BYTES, RunKeys, check_id

# Check and add in one step, so that two workers with the same group cannot both add it. The token tells a call that is
# repeated because its reply was lost from a second attempt at the group.
_PUBLISH = """
local known = redis.call('HGET', KEYS[2], ARGV[1])
if known then return known == ARGV[3] and 1 or 0 end
redis.call('XADD', KEYS[1], '*', 'group', ARGV[1], 'data', ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
"""


class ScoredPublisher:
    """Publishes scored groups of any run; a group is in its stream at most once, however often it is published."""

    def __init__(self, redis_url: str, timeouts: Timeouts | None = None) -> None:
        self._url = redis_url
        self._timeouts = timeouts or Timeouts()
        self._redis = async_client(redis_url, self._timeouts)

    async def publish(self, group: ScoredGroup) -> bool:
        """Add the group to `hw:{run}:scored`; False when it is there already (or ever was).

        Raises `InvalidArgument` for bad ids or an entry over 64 KiB, `Unavailable` when Redis stays away.
        """
        keys = RunKeys(group.run_id)
        check_id(group.group_id, field="group_id")
        data = group.SerializeToString()
        if len(data) > MAX_ENTRY_BYTES:
            raise InvalidArgument(
                f"group {group.group_id} has {len(data)} bytes of references and metadata; a stream entry holds "
                f"{MAX_ENTRY_BYTES}. Use smaller groups, or less metadata on the prompt",
                reason="ENTRY_TOO_LARGE",
            )
        return bool(await self._eval(keys, group.group_id, data))

    async def is_published(self, run_id: str, group_id: str) -> bool:
        """Whether the group is, or ever was, in the stream."""
        keys = RunKeys(run_id)
        try:
            return bool(await self._redis.hexists(keys.groups, group_id))  # type: ignore[misc]
        except RedisError as error:
            raise explain(error, self._url) from error

    async def ping(self) -> None:
        """Raise `Unavailable` when Redis does not answer."""
        try:
            await self._redis.ping()
        except RedisError as error:
            raise explain(error, self._url) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _eval(self, keys: RunKeys, group_id: str, data: bytes) -> int:
        deadline, delay = time.monotonic() + self._timeouts.retry_s, 0.1
        arguments = (keys.scored, keys.groups, group_id, data, uuid.uuid4().hex)
        while True:
            try:
                return await self._redis.eval(_PUBLISH, 2, *arguments)  # type: ignore[misc]
            except RETRYABLE as error:
                if time.monotonic() + delay > deadline:
                    raise explain(error, self._url) from error
                await asyncio.sleep(delay)
                delay = min(2.0, delay * 2)
            except RedisError as error:
                raise explain(error, self._url) from error
