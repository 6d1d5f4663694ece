"""A run's events in the memory of a process, for the readers that follow it here."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from app.streaming.subscription import Subscription

Id = tuple[int, int]
START: Id = (-1, -1)
MEMORY = 2 * 2**20
"""Bytes of a run that memory keeps for readers; older events are read from the store."""
GAP = "gap"
"""Stands for events that are not kept, or not any more."""

FEW = 8
"""Readers of a run that are told of each event as it comes."""
SECONDS_A_READER = 0.0005
MOST_SECONDS = 0.05

_id = attrgetter("id")


@dataclass(slots=True)
class Frame:
    """One event, encoded once for all readers, and never changed. `sse` is what goes over the wire."""

    id: Id
    event: str
    data: bytes
    sse: bytes

    @classmethod
    def make(cls, epoch: int, seq: int, event: str, data: bytes) -> Frame:
        """Encode an event."""
        sse = b"event: %b\r\ndata: %b\r\nid: %d-%d\r\n\r\n" % (event.encode(), data, epoch, seq)
        return cls((epoch, seq), event, data, sse)

    @classmethod
    def parse(cls, sse: bytes) -> Iterator[Frame]:
        """The frames of what went over the wire."""
        for block in sse.split(b"\r\n\r\n")[:-1]:
            event, data, id_ = block.split(b"\r\n")
            epoch, _, seq = id_[4:].partition(b"-")
            yield cls((int(epoch), int(seq)), event[7:].decode(), data[6:], block + b"\r\n\r\n")

    @property
    def epoch(self) -> int:
        """Which claim of the run wrote it."""
        return self.id[0]

    @property
    def seq(self) -> int:
        """Which event of that claim it is, from 1."""
        return self.id[1]


class Channel:
    """Frames of a run, in order and without a hole, from some id on."""

    def __init__(self, since: Id) -> None:
        self.since = since  # what comes behind this id is held
        self._frames: list[Frame] = []
        self._bytes = 0

    @classmethod
    def of_claim(cls, epoch: int) -> Channel:
        """For what a claim of the run writes. Before the first one nothing was written."""
        return cls(START if epoch == 1 else (epoch, 0))

    def append(self, frame: Frame) -> None:
        """Hold a frame."""
        self._frames.append(frame)
        self._bytes += len(frame.sse)

    def trim(self, stored: Id) -> None:
        """Frames up to `stored` can be read elsewhere; let go of the oldest when there is too much."""
        if self._bytes <= MEMORY:
            return
        count = 0
        for frame in self._frames:
            if frame.id > stored or self._bytes <= MEMORY * 3 // 4:
                break
            self._bytes -= len(frame.sse)
            self.since = frame.id
            count += 1
        del self._frames[:count]

    @property
    def newest(self) -> Id:
        """Id of the last frame."""
        return self._frames[-1].id if self._frames else self.since

    def after(self, id_: Id, limit: int) -> list[Frame]:
        """Up to `limit` frames behind `id_`."""
        frames = self._frames
        if not frames or id_ >= frames[-1].id:
            return []
        start = bisect_right(frames, id_, key=_id)
        return frames[start : start + limit]


class Topic:
    """A run that somebody here writes or reads."""

    def __init__(self) -> None:
        self.channel: Channel | None = None  # of the writer here
        self.last: Channel | None = None  # of a writer that has left, for readers that have not caught up
        self.tail: Channel | None = None  # of a writer elsewhere, filled by the store
        self.readers: WeakSet[Subscription] = WeakSet()
        self.over: float | None = None  # since when (of the loop's clock) the run is known to be over
        self.read: Id = START  # how far the store has been read
        self.ticks = 0  # heartbeats so far
        self.looks = 0  # reasons so far to look into the store
        self._changed = asyncio.Event()
        self._awaited = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether the topic can be forgotten."""
        return self.channel is None and not self.readers

    def changed(self) -> asyncio.Event:
        """Set at the next wake. To be had before looking, so that nothing is missed between looking and waiting."""
        self._awaited = True
        return self._changed

    def wake(self) -> None:
        """Tell readers of new frames. Costs next to nothing until they have looked again.

        A few are told at once. Many are told less often, since each of them costs a send.
        """
        if self._awaited and self._timer is None:
            if (readers := len(self.readers)) <= FEW:
                self._tell()
            else:
                delay = min(readers * SECONDS_A_READER, MOST_SECONDS)
                self._timer = asyncio.get_running_loop().call_later(delay, self._tell)

    def look(self) -> None:
        """Tell readers that the store may have something."""
        self.looks += 1
        self._tell()

    def tick(self) -> None:
        """Tell readers that a heartbeat is due."""
        self.ticks += 1
        self._tell()

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._awaited:
            self._awaited = False
            self._changed.set()
            self._changed = asyncio.Event()
