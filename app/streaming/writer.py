"""Writes the events of one claim of a run: to readers here at once, to the table in groups, the last ones with the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import UUID

import orjson
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import driver_connection, hint
from app.streaming.channel import GAP, Frame, Topic

if TYPE_CHECKING:
    from app.streaming.log import EventLog

EVENTS_CHANNEL = "keyturn_events"
PENDING_EVENTS = 100_000
"""Events that wait for a database that is away. Beyond that the oldest are given up: state itself is in checkpoints."""
APPEND = """
INSERT INTO run_events (run_id, epoch, seq, event, data)
SELECT %b::uuid, %b::int, e.* FROM unnest(%b::int[], %b::text[], %b::text[]) AS e
ON CONFLICT DO NOTHING
"""


class RunWriter:
    """Writes the events of one claim of one run."""

    def __init__(self, events: EventLog, topic: Topic, run_id: UUID, epoch: int) -> None:
        self.run_id = run_id
        self._events = events
        self._topic = topic
        self._epoch = epoch
        self._seq = 0
        self._unflushed: list[Frame] = []
        self._own = False
        self._channel = topic.channel

    def publish(self, event: str, data: bytes) -> None:
        """Append an event. Readers here have it at once; the table soon. Never waits."""
        self._seq += 1
        frame = Frame.make(self._epoch, self._seq, event, data)
        if self._channel is not None:
            self._channel.append(frame)
            self._topic.wake()
        self._unflushed.append(frame)
        if len(self._unflushed) > PENDING_EVENTS:
            self._give_up(PENDING_EVENTS // 10)
        self._events.mark(self)

    def _give_up(self, count: int) -> None:
        """The oldest events that wait will not be in the table. Who replays them is told how many there were."""
        given_up = self._unflushed[:count]
        if given_up[0].event == GAP:
            count += int(orjson.loads(given_up[0].data)["events"]) - 1
        data = orjson.dumps({"run_id": str(self.run_id), "events": count, "reason": "not_stored"})
        self._unflushed[: len(given_up)] = [Frame.make(self._epoch, given_up[-1].seq, GAP, data)]

    async def settle(self) -> None:
        """Nothing more is published: from here on the flusher has no part in this. Before the finishing transaction, which
        must not wait for another connection while it holds one.
        """
        self._own = True
        self._events.unmark(self)
        await self._events.settled()

    async def finish(self, tx: AsyncSession, events: list[tuple[str, bytes]]) -> Callable[[], None]:
        """Write what is unflushed and the last events with the run's finishing transaction, durably, after `settle`.

        Returns what to call after the commit: it hands the last events to readers here and ends their streams. May be
        called again if the transaction did not commit.
        """
        rows, committed = self.last(events)
        columns = [[f.seq for f in rows], [f.event for f in rows], [f.data.decode() for f in rows]]
        connection = await driver_connection(tx)
        await connection.execute(APPEND, [self.run_id, self._epoch, *columns])
        hint(tx, EVENTS_CHANNEL, str(self.run_id))
        return committed

    def last(self, events: list[tuple[str, bytes]]) -> tuple[list[Frame], Callable[[], None]]:
        """What is still to be written when the run ends with these events, and what to call once it is committed."""
        last = [Frame.make(self._epoch, self._seq + i, event, data) for i, (event, data) in enumerate(events, 1)]

        def committed() -> None:
            self._unflushed.clear()
            if self._channel is not None:
                for frame in last:
                    self._channel.append(frame)
            self._leave()

        return [*self._unflushed, *last], committed

    def abandon(self) -> None:
        """The lease is lost: whoever holds it now writes on. Readers here go over to the table."""
        self._own = True
        self._events.unmark(self)
        self._unflushed.clear()
        self._leave()

    def _leave(self) -> None:
        if self._topic.channel is self._channel:
            self._topic.channel = None
        self._topic.last = self._channel
        self._topic.wake(look=True)
        self._events.forget(self.run_id)

    # -- for the flusher

    def take(self, limit: int) -> list[Frame]:
        """The oldest frames that are not in the table yet."""
        frames, self._unflushed = self._unflushed[:limit], self._unflushed[limit:]
        if self._unflushed and not self._own:
            self._events.mark(self)
        return frames

    def flushed(self, frames: list[Frame]) -> None:
        """These are in the table: memory need not hold them for slow readers."""
        if self._channel is not None and frames:
            self._channel.trim(frames[-1].seq)

    def put_back(self, frames: list[Frame]) -> None:
        """These are not: try again later."""
        self._unflushed[:0] = frames
        if not self._own:
            self._events.mark(self)
