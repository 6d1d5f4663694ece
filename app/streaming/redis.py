"""Events in Redis Streams, for more of them than Postgres should write. Redis may go away at any time: it holds nothing else.

One stream a run. An entry holds some frames as they go over the wire, under the id of the last of them, so that Redis itself
refuses entries of an earlier claim, and what is written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import UUID

import orjson
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import after_commit
from app.streaming.channel import GAP, START, Channel, Frame, Id
from app.streaming.store import Batch, Woken

log = structlog.get_logger(__name__)

KEY = "keyturn:run:"
FIELD = b"sse"
KEEP_EVENTS = 100_000
"""Of one claim of a run. Older ones are trimmed."""
ENTRY_BYTES = 64 * 2**10
ENTRIES = 50
"""Entries that are read at once."""
UNENDED_SECONDS = 7 * 24 * 3600
"""How long events stay, beyond the usual, of a run that does not tell its end."""
TIMEOUT_SECONDS = 2.0
BLOCK_SECONDS = 10.0
NUDGE_SECONDS = 0.005
REFUSED = "equal or smaller"


class RedisStore:
    """Two connections or a few: commands share a pool, and one more waits for whatever is written to runs followed here."""

    atomic = False
    outages: tuple[type[Exception], ...] = (RedisError, OSError)

    def __init__(self, url: str, *, keep_seconds: float) -> None:
        """On the Redis at `url`, which need not be there; ValueError if it is no such address. Events go `keep_seconds`
        after the end of their run.
        """
        options: dict[str, Any] = {"protocol": 2, "socket_connect_timeout": TIMEOUT_SECONDS}
        once_more = Retry(NoBackoff(), 1)
        self._redis: Redis = Redis.from_url(url, socket_timeout=TIMEOUT_SECONDS, retry=once_more, **options)
        self._waiting: Redis = Redis.from_url(
            url,
            socket_timeout=BLOCK_SECONDS + TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
            single_connection_client=True,
            **options,
        )
        self._keep = max(1, int(keep_seconds))
        self._followed: dict[UUID, Channel] = {}
        self._some = asyncio.Event()
        self._stale = False
        self._blocked: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken: Woken = lambda _ids, _look: None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Close the connections in the end. They are made when they are needed."""
        try:
            yield
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for client in (self._redis, self._waiting):
                with suppress(*self.outages):
                    await client.aclose()

    def attach(self, woken: Woken) -> None:
        """See EventStore."""
        self._woken = woken

    # -- writing

    async def append(self, batches: Sequence[Batch]) -> None:
        """See EventStore. One round trip."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for run_id, frames in batches:
                key = _key(run_id)
                for entry in _entries(frames):
                    pipe.execute_command("XADD", key, *_trimmed(entry[-1]), _id(entry[-1].id), FIELD, _joined(entry))
                pipe.expire(key, self._keep + (0 if frames[-1].event == "end" else UNENDED_SECONDS))
            for answer in await pipe.execute(raise_on_error=False):
                if isinstance(answer, Exception) and not (isinstance(answer, ResponseError) and REFUSED in str(answer)):
                    raise answer

    async def finish(self, tx: AsyncSession, run_id: UUID, frames: Sequence[Frame]) -> None:
        """See EventStore. Nothing: a run does not wait for Redis."""

    def written(self, run_id: UUID) -> None:
        """See EventStore. Nothing: readers see what arrives."""

    async def close(self, tx: AsyncSession, run_id: UUID, data: bytes) -> None:
        """See EventStore. If Redis is away, readers learn of the end from the run's row."""

        async def end() -> None:
            with suppress(*self.outages):
                epoch, seq = max(await self.newest(run_id), (0, 0))
                await self.append([(run_id, [Frame.make(epoch, seq + 1, "end", data)])])

        after_commit(tx, lambda: self._spawn(end()))

    # -- reading

    async def read(self, run_id: UUID, after: Id, limit: int) -> list[Frame]:
        """See EventStore."""
        answer: Any = await self._redis.xread({_key(run_id): _id(after)}, count=ENTRIES)
        return _frames(answer[0][1], run_id, after) if answer else []

    async def newest(self, run_id: UUID) -> Id:
        """See EventStore."""
        last: Any = await self._redis.xrevrange(_key(run_id), count=1)
        return _parsed(last[0][0]) if last else START

    async def behind(self, positions: Mapping[UUID, Id]) -> Iterable[UUID]:
        """See EventStore. None: whoever follows misses nothing."""
        return ()

    def follow(self, run_id: UUID, after: Id) -> Channel | None:
        """See EventStore."""
        channel = self._followed[run_id] = Channel(after)
        self._some.set()
        if not self._stale:
            self._stale = True
            if self._blocked is not None:
                self._spawn(self._nudge())
        return channel

    def unfollow(self, run_id: UUID) -> None:
        """See EventStore."""
        self._followed.pop(run_id, None)
        if not self._followed:
            self._some.clear()

    async def run(self) -> None:
        """Wait for what is written to runs followed here, all in one command, until cancelled."""
        delay = 0.1
        while True:
            await self._some.wait()
            try:
                blocked = await self._waiting.client_id()
                delay = 0.1
                while self._followed:
                    await self._receive(blocked)
            except self.outages as error:
                log.warning("redis_awaited", error=str(error), retry_in=delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 2.0)

    async def _receive(self, connection: int) -> None:
        followed = {_key(run_id): (run_id, channel) for run_id, channel in self._followed.items()}
        positions = {key: _id(channel.newest) for key, (_, channel) in followed.items()}
        self._stale, self._blocked = False, connection
        try:
            answer: Any = await self._waiting.xread(positions, count=ENTRIES, block=int(BLOCK_SECONDS * 1000))  # type: ignore[arg-type]
        finally:
            self._blocked = None
        for key, entries in answer or ():
            run_id, channel = followed[key.decode()]
            for frame in _frames(entries, run_id, channel.newest):
                channel.append(frame)
            channel.trim(channel.newest)
            self._woken((run_id,), False)

    async def _nudge(self) -> None:
        """End the wait, so that it begins anew with all runs. Again and again, since it may not have begun yet."""
        with suppress(*self.outages):
            while self._stale and self._blocked is not None:
                await self._redis.client_unblock(self._blocked)
                await asyncio.sleep(NUDGE_SECONDS)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work, name="redis")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key(run_id: UUID) -> str:
    return f"{KEY}{run_id}"


def _id(id_: Id) -> str:
    return f"{max(id_[0], 0)}-{max(id_[1], 0)}"


def _parsed(id_: bytes) -> Id:
    epoch, _, seq = id_.partition(b"-")
    return int(epoch), int(seq)


def _joined(frames: Sequence[Frame]) -> bytes:
    return b"".join([f.sse for f in frames])


def _entries(frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
    """Frames in groups of a moderate size, so that who reads some entries gets a moderate number of bytes."""
    start = size = 0
    for i, frame in enumerate(frames):
        if size and size + len(frame.sse) > ENTRY_BYTES:
            yield frames[start:i]
            start, size = i, 0
        size += len(frame.sse)
    yield frames[start:]


def _trimmed(last: Frame) -> tuple[str, ...]:
    """Arguments that let go of what is too old. Ids count events, so this bounds events and not entries."""
    return ("MINID", "~", _id((last.epoch, last.seq - KEEP_EVENTS))) if last.seq > KEEP_EVENTS else ()


def _frames(entries: Iterable[tuple[bytes, dict[bytes, bytes]]], run_id: UUID, after: Id) -> list[Frame]:
    """The frames of entries behind an id, with a notice wherever some are missing."""
    frames: list[Frame] = []
    for _, fields in entries:
        for frame in Frame.parse(fields[FIELD]):
            if frame.id <= after:
                continue
            if not _follows(frame, after):
                frames.append(_gap(run_id, after, frame))
            frames.append(frame)
            after = frame.id
    return frames


def _follows(frame: Frame, after: Id) -> bool:
    return frame.event == GAP or frame.seq == (after[1] + 1 if frame.epoch == after[0] else 1)


def _gap(run_id: UUID, after: Id, frame: Frame) -> Frame:
    """A notice in place of what was trimmed, has expired, or was lost with Redis."""
    first = after[1] if after[0] == frame.epoch else 0 if (after, frame.epoch) == (START, 1) else None
    events = frame.seq - 1 - first if first is not None else None
    data = orjson.dumps({"run_id": str(run_id), "events": events, "reason": "expired"})
    return Frame.make(frame.epoch, frame.seq - 1, GAP, data)
