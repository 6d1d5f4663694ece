"""One reader of one run: from memory where that goes back far enough, else from the store.

A reader that is slow, or far behind, costs neither the run nor other readers anything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import UUID

import orjson

from app.streaming.channel import GAP, START, Frame, Id, Topic
from app.streaming.store import Reason

if TYPE_CHECKING:
    from app.streaming.log import EventLog

BATCH = 500
GRACE = 2.0
"""Seconds after a run's end in which its last events may still be on their way to a store that is not atomic."""
ALWAYS = frozenset({"metadata", "attempt", GAP, "error", "end"})


class Subscription:
    """An async iterator over batches of frames; an empty one when a heartbeat is due."""

    def __init__(
        self, events: EventLog, topic: Topic, run_id: UUID, after: Id, *, live_only: bool, modes: frozenset[str] | None
    ) -> None:
        self._events = events
        self._topic = topic
        self._run_id = run_id
        self._modes = _event_names(modes)
        self._position = after
        self._find_end = live_only and topic.channel is None
        if live_only and topic.channel is not None:
            self._position = topic.channel.newest
        self._ticks = topic.ticks
        self._looks = -1
        self._asked = False
        self._done = False
        topic.readers.add(self)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> list[Frame]:
        topic = self._topic
        while not self._done and not self._events.stopping:
            changed = topic.changed()
            frames: list[Frame] | None = self._held()
            if not frames and self._ticks != topic.ticks:
                self._ticks = topic.ticks
                return []
            if not frames:
                frames = await self._look() if self._may_find else None
            if frames:
                self._position = frames[-1].id
                self._done = frames[-1].event == "end"
                shown = frames if self._modes is None else [f for f in frames if self._wants(f)]
                if shown:
                    self._ticks = topic.ticks
                    return shown
            elif frames is None:
                await changed.wait()
                await asyncio.sleep(0)  # what else this turn of the loop publishes goes into the same batch
        self._leave()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading."""
        self._done = True
        self._leave()

    def _held(self) -> list[Frame]:
        """The next frames, from memory."""
        for channel in (self._topic.channel, self._topic.tail, self._topic.last):
            if channel is not None and self._position >= channel.since and (frames := channel.after(self._position, BATCH)):
                return frames
        return []

    @property
    def _may_find(self) -> bool:
        """Whether the store may have what memory does not."""
        here = self._topic.channel
        return self._looks != self._topic.looks and (here is None or self._position < here.since)

    async def _look(self) -> list[Frame] | None:
        """The next frames, from the store. None: there are none until something changes. Empty: look again."""
        topic, events = self._topic, self._events
        channel = topic.channel
        since = START if channel is None else channel.since
        try:
            async with asyncio.timeout(events.patience):
                # Ask before reading: what a run wrote before it ended is then in the store when we look.
                if not self._asked:
                    await events.ask([self._run_id])
                    self._asked = True
                looks, over = topic.looks, topic.over
                if self._find_end:
                    self._position = max(self._position, await events.end_of(self._run_id, looks))
                    self._find_end = False
                frames = await events.read(self._run_id, self._position, looks, BATCH)
        except events.outages:  # the stream outlives the outage: the next heartbeat looks again
            return None if events.store.atomic or topic.over is None else await self._tell("unavailable")
        if frames:
            topic.read = max(topic.read, frames[-1].id)
            return frames
        if topic.channel is not channel or (channel is not None and channel.since != since):
            return []  # while we read, memory let go of what the store did not have yet
        if channel is not None and self._position < since:
            return self._go_over(since)
        if over is not None and (events.store.atomic or asyncio.get_running_loop().time() - over >= GRACE):
            return await self._tell("not_stored")
        self._looks = looks
        if channel is None and topic.tail is None:
            topic.tail = events.store.follow(self._run_id, self._position)
        return None

    def _go_over(self, since: Id) -> list[Frame]:
        """The store has nothing more that comes before what memory holds: go on there."""
        if since[1] == 0:  # all of this claim is in memory, and that was all of the claims before
            self._position = since
            return []
        # Memory let go of what the store has lost, or had to give up and cannot tell yet.
        events = since[1] - self._position[1] if self._position[0] == since[0] else None
        data = orjson.dumps({"run_id": str(self._run_id), "events": events, "reason": "not_stored"})
        return [Frame.make(*since, GAP, data)]

    async def _tell(self, reason: Reason) -> list[Frame] | None:
        """The run is over, and the store does not have its end."""
        told: list[Frame] = []
        if not self._events.store.atomic:
            try:
                told = await self._events.endings.told(self._run_id, reason)
            except self._events.outages:
                return None
        frames = [f for f in told if f.id > self._position and (self._position == START or f.event != "metadata")]
        self._done = not frames
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
