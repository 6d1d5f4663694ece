"""The event log: what clients saw of a run, append-only, the same for every reader on every replica.

Publishing hands events to readers in this process at once and to the store in groups. A reader that is behind what memory
holds reads the store. Knows nothing of where the events are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

import orjson
from psycopg import Error as DatabaseError
from psycopg_pool import PoolTimeout
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from app.streaming.channel import START, Channel, Frame, Id, Topic
from app.streaming.flusher import Flusher
from app.streaming.store import Endings, EventStore, Reason
from app.streaming.subscription import Subscription
from app.streaming.writer import RunWriter

T = TypeVar("T")
LAST_FLUSH_SECONDS = 1.0


class EventLog:
    """Publishes and reads events."""

    def __init__(
        self, store: EventStore, endings: Endings, *, heartbeat_seconds: float = 5.0, flush_seconds: float = 0.02
    ) -> None:
        self.store = store
        self.endings = endings
        self.outages: tuple[type[Exception], ...] = (*store.outages, DatabaseError, DBAPIError, PoolTimeout, TimeoutError)
        self.patience = max(heartbeat_seconds, 1.0)
        """Seconds that a reader waits for the store before it looks to its heartbeat."""
        self.stopping = False
        self._heartbeat = heartbeat_seconds
        self._topics: dict[UUID, Topic] = {}
        self._flusher = Flusher(store, flush_seconds)
        self._asked: dict[Hashable, asyncio.Task[Any]] = {}
        store.attach(self._woken)

    # -- writing

    def open(self, run_id: UUID, epoch: int) -> RunWriter:
        """Begin to write a run's events under the epoch of its claim."""
        topic = self._topic(run_id)
        if topic.tail is not None:
            self.store.unfollow(run_id)
            topic.tail = None
        topic.channel = channel = Channel.of_claim(epoch)
        topic.look()
        return RunWriter(self, self._flusher, topic, channel, run_id, epoch)

    async def close(self, tx: AsyncSession, run_id: UUID) -> None:
        """Write the end of a run that was cancelled while it waited; its readers stop after the commit."""
        data = orjson.dumps({"run_id": str(run_id), "status": "interrupted", "stop_reason": "cancelled"})
        await self.store.close(tx, run_id, data)

    # -- reading

    def subscribe(
        self, run_id: UUID, *, after: Id | None, live_only: bool = False, modes: frozenset[str] | None = None
    ) -> Subscription:
        """Follow a run: batches of frames behind `after` (None: all), each in order; an empty batch when a heartbeat is due.

        Ends after the frame `end`, or when the run is over and the log has nothing more. `live_only` starts at what is
        published from now on. `modes` are stream modes as requested on the wire. The subscription counts from this call.
        """
        return Subscription(self, self._topic(run_id), run_id, after or START, live_only=live_only, modes=modes)

    async def lacking(self, run_id: UUID) -> Reason | None:
        """Why nothing of a finished run can be read again. None if something can."""
        try:
            return None if await self.store.newest(run_id) != START else "expired"
        except self.store.outages:
            if self.store.atomic:
                raise
            return "unavailable"

    def shut(self) -> None:
        """End all streams: the server stops. Clients come back with their last id."""
        self.stopping = True
        for topic in tuple(self._topics.values()):
            topic.tick()

    # -- inner life

    async def run(self) -> None:
        """Flush and beat until cancelled; then flush what is left."""
        work = {"event-store": self.store.run(), "heartbeat": self._beat(), "flusher": self._flusher.run()}
        tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in work.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancelled(*tasks, *self._asked.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_FLUSH_SECONDS):
                    await self._flusher.flush(patient=False)

    async def _beat(self) -> None:
        """One timer for all streams."""
        checking: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(self._heartbeat)
                for run_id, topic in tuple(self._topics.items()):
                    topic.tick()
                    self.forget(run_id)  # readers may have gone without a word
                if checking is None or checking.done():
                    checking = asyncio.create_task(self._check(), name="events-check")
        finally:
            if checking is not None:
                await _cancelled(checking)

    async def _check(self) -> None:
        """Find out about runs that are read here and not written here: whether they are over, and what was missed."""
        topics = {id_: topic for id_, topic in self._topics.items() if topic.channel is None and topic.readers}
        if not topics:
            return
        with suppress(*self.outages):
            await self.ask([id_ for id_, topic in topics.items() if topic.over is None])
            self._woken([id_ for id_, topic in topics.items() if topic.over is not None], True)
            self._woken(await self.store.behind({id_: topic.read for id_, topic in topics.items()}), True)

    async def ask(self, run_ids: Sequence[UUID]) -> None:
        """Find out which of these runs are over."""
        if not run_ids:
            return
        now = asyncio.get_running_loop().time()
        for run_id, seconds in (await self.endings.ended(run_ids)).items():
            topic = self._topics.get(run_id)
            if topic is not None and topic.over is None:
                topic.over = now - seconds
                topic.look()

    async def read(self, run_id: UUID, after: Id, looks: int, limit: int) -> list[Frame]:
        """Frames behind an id, from the store. Readers at the same place who look for the same reason share one reading."""
        return await self._shared((run_id, after, looks), lambda: self.store.read(run_id, after, limit))

    async def end_of(self, run_id: UUID, looks: int) -> Id:
        """Id of the last frame in the store."""
        return await self._shared((run_id, looks), lambda: self.store.newest(run_id))

    async def _shared(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the store answers, asked once for all who want the same, and in a task that no reader's leaving disturbs."""
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(ask(), name="event-store-read")

            def done(task: asyncio.Task[T]) -> None:
                self._asked.pop(key, None)
                if not task.cancelled():
                    task.exception()  # it may be that nobody waits any more

            task.add_done_callback(done)
        return await asyncio.shield(task)

    def _topic(self, run_id: UUID) -> Topic:
        topic = self._topics.get(run_id)
        if topic is None:
            topic = self._topics[run_id] = Topic()
        return topic

    def forget(self, run_id: UUID) -> None:
        """Drop a topic that nobody reads or writes any more."""
        topic = self._topics.get(run_id)
        if topic is not None and topic.idle:
            del self._topics[run_id]
            if topic.tail is not None:
                self.store.unfollow(run_id)

    def _woken(self, run_ids: Iterable[UUID] | None, look: bool) -> None:
        """Something was written elsewhere, or (None) may have been."""
        topics = self._topics.values() if run_ids is None else [t for id_ in run_ids if (t := self._topics.get(id_))]
        for topic in tuple(topics):
            if topic.channel is None:
                topic.look() if look else topic.wake()


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended. `asyncio.wait_for` of Python 3.11, which libraries use, may lose a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)
