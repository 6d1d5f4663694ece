"""Writes the events of one claim of a run: to readers here at once, to the store in groups, the last ones with its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import UUID

import orjson
import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.streaming.channel import GAP, Channel, Frame, Topic
from app.streaming.flusher import PENDING_BYTES, Flusher

if TYPE_CHECKING:
    from app.streaming.log import EventLog

log = structlog.get_logger(__name__)

OVERHEAD = 300
"""Bytes of memory that an event takes besides its text."""


class RunWriter:
    """Writes the events of one claim of one run."""

    def __init__(self, events: EventLog, flusher: Flusher, topic: Topic, channel: Channel, run_id: UUID, epoch: int) -> None:
        self.run_id = run_id
        self.over = False
        """Whether nothing more is published, because the run has ended."""
        self.waiting = 0
        """Bytes that are not in the store yet."""
        self._events = events
        self._store = events.store
        self._flusher = flusher
        self._topic = topic
        self._channel = channel
        self._epoch = epoch
        self._seq = 0
        self._unflushed: list[Frame] = []
        self._own = False

    def publish(self, event: str, data: bytes) -> None:
        """Append an event. Readers here have it at once; the store soon. Never waits."""
        self._seq += 1
        frame = Frame.make(self._epoch, self._seq, event, data)
        self._channel.append(frame)
        self._topic.wake()
        if not self._unflushed:
            self._flusher.add(self)
        self._unflushed.append(frame)
        self.waiting += len(frame.sse) + OVERHEAD
        if self.waiting > PENDING_BYTES:
            self.give_up()

    async def settle(self) -> None:
        """Nothing more is published. Before the finishing transaction, which must not wait for another connection while it
        holds one: if it writes the last events, the flusher has no part in this from here on.
        """
        if self._store.atomic:
            self._own = True
            self._flusher.remove(self)
            await self._flusher.settled()

    async def finish(self, tx: AsyncSession, events: list[tuple[str, bytes]]) -> Callable[[], None]:
        """Write what is unflushed and the last events with the run's finishing transaction, after `settle`.

        Returns what to call after the commit: it hands the last events to readers here and ends their streams. May be
        called again if the transaction did not commit.
        """
        rows, committed = self.last(events)
        if rows:
            await self._store.finish(tx, self.run_id, rows)
        return committed

    def last(self, events: list[tuple[str, bytes]]) -> tuple[list[Frame], Callable[[], None]]:
        """What is still to be written by the transaction that ends the run with these events, and what to call after it."""
        last = [Frame.make(self._epoch, self._seq + i, event, data) for i, (event, data) in enumerate(events, 1)]

        def committed() -> None:
            for frame in last:
                self._channel.append(frame)
            self.over = True
            if self._store.atomic:
                self._unflushed.clear()
                self._store.written(self.run_id)
            else:
                self._unflushed += last
                self.waiting += sum(len(f.sse) + OVERHEAD for f in last)
                self._flusher.add(self)
            self._leave()

        return ([*self._unflushed, *last] if self._store.atomic else []), committed

    def abandon(self) -> None:
        """The lease is lost: whoever holds it now writes on. Readers here go over to the store."""
        self._own = True
        self._flusher.remove(self)
        self._unflushed.clear()
        self._leave()

    def _leave(self) -> None:
        if self._topic.channel is self._channel:
            self._topic.channel = None
        self._topic.last = self._channel
        self._topic.look()
        self._events.forget(self.run_id)

    # -- for the flusher

    def take(self, limit: int, size: int) -> list[Frame]:
        """The oldest frames that are not in the store yet: up to `limit`, and not many more than `size` bytes."""
        frames = self._unflushed
        count = min(len(frames), limit)
        if self.waiting > size:
            taken = 0
            for i in range(count):
                taken += len(frames[i].sse) + OVERHEAD
                if taken >= size:
                    count = i + 1
                    break
        self._unflushed = frames[count:]
        self._count()
        if self._unflushed:
            self._flusher.add(self)
        return frames[:count]

    def flushed(self, frames: list[Frame]) -> None:
        """These are in the store: memory need not hold them for slow readers."""
        self._channel.trim(frames[-1].id)

    def put_back(self, frames: list[Frame]) -> None:
        """These are not: try again later."""
        self._unflushed[:0] = frames
        self._count()
        if not self._own:
            self._flusher.add(self)

    def give_up(self) -> int:
        """The older half of what waits will not be in the store; readers of it are told how many events there were. All of
        it if the run has ended. Returns how many bytes that sets free.
        """
        frames, before = self._unflushed, self.waiting
        count = len(frames) if self.over else len(frames) // 2
        if not count:
            return 0
        gone, rest = frames[:count], frames[count:]
        self._channel.trim(gone[-1].id)
        if not self.over:
            events = count if gone[0].event != GAP else count - 1 + int(orjson.loads(gone[0].data)["events"])
            data = orjson.dumps({"run_id": str(self.run_id), "events": events, "reason": "not_stored"})
            rest.insert(0, Frame.make(*gone[-1].id, GAP, data))
        self._unflushed = rest
        self._count()
        log.warning("events_given_up", run_id=str(self.run_id), events=count)
        return before - self.waiting

    def _count(self) -> None:
        self.waiting = sum([len(f.sse) + OVERHEAD for f in self._unflushed])
