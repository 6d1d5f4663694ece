"""A run's events in the memory of the process that writes them, and the readers that follow them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING
from uuid import UUID
from weakref import WeakSet

import psycopg
from psycopg_pool import PoolTimeout
from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    from app.streaming.log import EventLog

Id = tuple[int, int]
START: Id = (-1, -1)
MEMORY = 2 * 2**20
"""Bytes of a run that memory keeps for readers; older events are read from the table."""
BATCH = 500
OUTAGE = (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, DBAPIError)
GAP = "gap"
"""Stands for events that are not kept, or not any more."""
ALWAYS = frozenset({"metadata", "attempt", GAP, "error", "end"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One event, encoded once for all readers. `sse` is what goes over the wire."""

    epoch: int
    seq: int
    event: str
    data: bytes
    sse: bytes

    @classmethod
    def make(cls, epoch: int, seq: int, event: str, data: bytes) -> Frame:
        """Encode an event."""
        sse = b"event: %b\r\ndata: %b\r\nid: %d-%d\r\n\r\n" % (event.encode(), data, epoch, seq)
        return cls(epoch, seq, event, data, sse)

    @property
    def id(self) -> Id:
        """Position in the run. Compared as numbers."""
        return self.epoch, self.seq


class Channel:
    """The last frames of one claim of a run. Sequence numbers have no gaps, so that a position is found by subtraction."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.dropped = 0  # frames up to this sequence number are not held any more
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._flushed = 0

    def append(self, frame: Frame) -> None:
        """Hold a frame."""
        self._frames.append(frame)
        self._bytes += len(frame.sse)

    def trim(self, flushed: int) -> None:
        """Frames up to `flushed` are in the table; let go of them when there is too much."""
        while self._bytes > MEMORY and self._frames and self._frames[0].seq <= flushed:
            frame = self._frames.popleft()
            self._bytes -= len(frame.sse)
            self.dropped = frame.seq

    @property
    def newest(self) -> Id:
        """Id of the last frame."""
        return (self.epoch, self._frames[-1].seq) if self._frames else (self.epoch, self.dropped)

    def holds_all_after(self, id_: Id) -> bool:
        """Whether nothing between `id_` and the first frame held is missing."""
        if id_[0] < self.epoch:
            return self.epoch == 1 and self.dropped == 0
        return id_[0] > self.epoch or id_[1] >= self.dropped

    def after(self, id_: Id, limit: int) -> list[Frame]:
        """Up to `limit` frames behind `id_`."""
        if id_[0] > self.epoch:
            return []
        skip = max(0, id_[1] - self.dropped) if id_[0] == self.epoch else 0
        if skip >= len(self._frames):
            return []
        return list(islice(self._frames, skip, skip + limit))


class Topic:
    """A run that somebody here writes or reads."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.last: Channel | None = None  # of a writer that has left, for readers that have not caught up
        self.readers: WeakSet[Subscription] = WeakSet()

    @property
    def idle(self) -> bool:
        """Whether the topic can be forgotten."""
        return self.channel is None and not self.readers

    def wake(self, *, tick: bool = False, look: bool = False) -> None:
        """Something happened: new frames, a heartbeat (`tick`), or perhaps something in the table (`look`)."""
        for reader in self.readers:
            reader.wake(tick=tick, look=look)


class Subscription:
    """One reader of one run: an async iterator over batches of frames."""

    def __init__(
        self, events: EventLog, topic: Topic, run_id: UUID, after: Id, *, live_only: bool, modes: frozenset[str] | None
    ) -> None:
        self._events = events
        self._topic = topic
        self._run_id = run_id
        self._modes = _event_names(modes)
        self._position = after
        self._find_end = False
        if live_only:
            self._find_end = topic.channel is None
            self._position = topic.channel.newest if topic.channel is not None else after
        self._woken = asyncio.Event()
        self._woken.set()
        self._look = True
        self._tick = False
        self._first = True
        self._done = False
        topic.readers.add(self)

    def wake(self, *, tick: bool, look: bool) -> None:
        """Called by the topic."""
        self._tick |= tick
        self._look |= look or tick
        self._woken.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> list[Frame]:
        if self._find_end:
            self._position = max(self._position, await self._events.newest(self._run_id))
            self._find_end = False
        while not self._done and not self._events.stopping:
            frames = await self._next_frames()
            if frames:
                self._position = frames[-1].id
                self._done = frames[-1].event == "end"
                shown = [f for f in frames if self._wants(f)]
                if shown:
                    return shown
                continue
            if self._tick:
                self._tick = False
                return []
            await self._woken.wait()
            await asyncio.sleep(0)  # what else this turn of the loop publishes goes into the same batch
        self._leave()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading."""
        self._done = True
        self._leave()

    async def _next_frames(self) -> list[Frame]:
        self._woken.clear()
        for channel in (self._topic.channel, self._topic.last):
            if channel is not None and channel.holds_all_after(self._position):
                frames = channel.after(self._position, BATCH)
                if frames or channel is self._topic.channel:
                    return frames
        if not self._look:
            return []
        try:
            # Ask before reading: what a run wrote before it ended is then in the table when we look.
            over = (self._tick or self._first) and await self._events.ended(self._run_id)
            frames = await self._events.read_after(self._run_id, self._position, BATCH)
        except OUTAGE:
            return []  # the stream outlives the outage: the next heartbeat looks again
        self._first = False
        channel = self._topic.channel
        if not frames and channel is not None and self._position < (channel.epoch, 0):
            # The table has nothing more of earlier claims: go over to what is written here now.
            self._position = (channel.epoch, 0)
            self._woken.set()
        elif not frames:
            self._look = False
            self._done = over
            if over:
                self._woken.set()
        return frames

    def _wants(self, frame: Frame) -> bool:
        if self._modes is None or frame.event in ALWAYS:
            return True
        return frame.event.partition("|")[0].partition("/")[0] in self._modes

    def _leave(self) -> None:
        self._topic.readers.discard(self)
        self._events.forget(self._run_id)


def _event_names(modes: frozenset[str] | None) -> frozenset[str] | None:
    """Names of events for modes: only `messages-tuple` is called differently."""
    return None if modes is None else frozenset("messages" if m == "messages-tuple" else m for m in modes)
