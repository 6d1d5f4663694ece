"""Writes what all runs of the process publish to the store, in groups. A failure is retried; it never blocks a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from app.streaming.channel import Frame
from app.streaming.store import EventStore

if TYPE_CHECKING:
    from app.streaming.writer import RunWriter

log = structlog.get_logger(__name__)

EVENTS_AT_ONCE = 5000
BYTES_AT_ONCE = 8 * 2**20
PENDING_BYTES = 128 * 2**20
"""What may wait for a store that is away. Beyond that the oldest events are given up: state itself is in checkpoints."""


class Flusher:
    """One per process. Writers say that they have something; the flusher takes it."""

    def __init__(self, store: EventStore, window: float) -> None:
        self._store = store
        self._window = window
        self._writers: dict[RunWriter, None] = {}
        self._work = asyncio.Event()
        self._in_flight: asyncio.Future[None] | None = None

    def add(self, writer: RunWriter) -> None:
        """A writer has something to flush."""
        self._writers[writer] = None
        self._work.set()

    def remove(self, writer: RunWriter) -> None:
        """A writer flushes by itself from here on."""
        self._writers.pop(writer, None)

    async def settled(self) -> None:
        """Wait for the flush in flight, if there is one."""
        if self._in_flight is not None:
            await self._in_flight

    async def run(self) -> None:
        """Flush until cancelled."""
        while True:
            await self._work.wait()
            await asyncio.sleep(self._window)
            await self.flush()

    async def flush(self, *, patient: bool = True) -> None:
        """Write what waits. Not `patient`: try once."""
        delay = 0.1
        while self._writers:
            self._work.clear()
            if await self._round():
                delay = 0.1
                continue
            if not patient:
                return
            self._relieve()
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _round(self) -> bool:
        """Write once for all runs. Returns whether the store took it."""
        taken = self._take()
        self._in_flight = asyncio.get_running_loop().create_future()
        written = False
        try:
            await self._store.append([(writer.run_id, frames) for writer, frames in taken])
            written = True
        except self._store.outages as error:
            log.warning("events_not_flushed", error=str(error))
        finally:
            for writer, frames in taken:
                writer.flushed(frames) if written else writer.put_back(frames)
            self._in_flight.set_result(None)
            self._in_flight = None
        return written

    def _take(self) -> list[tuple[RunWriter, list[Frame]]]:
        """The oldest frames of as many runs as fit."""
        taken: list[tuple[RunWriter, list[Frame]]] = []
        events = size = 0
        for writer in tuple(self._writers):
            del self._writers[writer]
            before = writer.waiting
            frames = writer.take(EVENTS_AT_ONCE - events, BYTES_AT_ONCE - size)
            if frames:
                taken.append((writer, frames))
            events, size = events + len(frames), size + before - writer.waiting
            if events >= EVENTS_AT_ONCE or size >= BYTES_AT_ONCE:
                break
        return taken

    def _relieve(self) -> None:
        """Have writers give up something when too much waits. First those whose runs have ended: their rows tell how."""
        waiting = sum(writer.waiting for writer in self._writers)
        if waiting <= PENDING_BYTES:
            return
        for writer in sorted(self._writers, key=lambda w: (w.over, w.waiting), reverse=True):
            if waiting <= PENDING_BYTES * 3 // 4:
                break
            waiting -= writer.give_up()
