"""The event log: what clients saw of a run, append-only, in Postgres.

Publishing hands events to readers in this process at once and to the table in groups, one statement for all runs of the
process. Readers on other replicas are woken by NOTIFY, which carries ids only and is but a hint. A reader that is behind
what memory holds reads the table, so that slow readers cost neither the run nor each other anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from uuid import UUID

import orjson
import structlog
from psycopg import Error as DatabaseError
from psycopg_pool import PoolTimeout
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import Database, after_commit, hint
from app.db.listen import Listener
from app.streaming.channel import START, Channel, Frame, Id, Subscription, Topic
from app.streaming.writer import EVENTS_CHANNEL, RunWriter

log = structlog.get_logger(__name__)

NOTIFY_IDS = 200
"""Run ids in one notification: Postgres takes less than 8000 bytes."""
FLUSH_EVENTS = 2000

# One round trip. `set_config` is evaluated before the commit, so that this commit does not wait for the disk: after a crash
# of Postgres the last moments of a stream may be missing, never its end, which is written with the run's own transaction.
FLUSH = """
WITH relaxed AS (SELECT set_config('synchronous_commit', 'off', true)),
written AS (
    INSERT INTO run_events (run_id, epoch, seq, event, data)
    SELECT e.* FROM unnest(%b::uuid[], %b::int[], %b::int[], %b::text[], %b::text[]) AS e (run_id, epoch, seq, event, data)
    JOIN runs r ON r.id = e.run_id AND r.epoch = e.epoch
    ON CONFLICT DO NOTHING
)
SELECT pg_notify(%s, ids) FROM unnest(%b::text[]) AS ids, relaxed
"""
CLOSE = text("""
INSERT INTO run_events (run_id, epoch, seq, event, data)
SELECT :run_id, :epoch, coalesce(max(seq), 0) + 1, 'end', :data FROM run_events WHERE run_id = :run_id AND epoch = :epoch
RETURNING seq
""")
READ = """
SELECT epoch, seq, event, data FROM run_events
WHERE run_id = %s AND (epoch, seq) > (%s, %s) ORDER BY epoch, seq LIMIT %s
"""
NEWEST = "SELECT epoch, seq FROM run_events WHERE run_id = %s ORDER BY epoch DESC, seq DESC LIMIT 1"


class EventLog:
    """Publishes and reads events. `ended(run_id)` tells whether a run will write no more; it is set after construction."""

    def __init__(
        self, database: Database, listener: Listener, *, heartbeat_seconds: float = 5.0, flush_seconds: float = 0.02
    ) -> None:
        self._database = database
        self._heartbeat = heartbeat_seconds
        self._window = flush_seconds
        self._topics: dict[UUID, Topic] = {}
        self._dirty: dict[UUID, RunWriter] = {}
        self._work = asyncio.Event()
        self._in_flight: asyncio.Future[None] | None = None
        self._stopping = False
        self.ended: Callable[[UUID], Awaitable[bool]] = _never
        listener.subscribe(EVENTS_CHANNEL, self._notified)

    # -- writing

    def open(self, run_id: UUID, epoch: int) -> RunWriter:
        """Begin to write a run's events under the epoch of its claim."""
        topic = self._topic(run_id)
        topic.channel = Channel(epoch)
        topic.wake(look=True)
        return RunWriter(self, topic, run_id, epoch)

    async def close(self, tx: AsyncSession, run_id: UUID, epoch: int) -> None:
        """Write the end of a run that was cancelled while it waited; its readers stop after the commit."""
        data = orjson.dumps({"run_id": str(run_id), "status": "interrupted", "stop_reason": "cancelled"})
        await tx.execute(CLOSE, {"run_id": run_id, "epoch": epoch, "data": data.decode()})
        hint(tx, EVENTS_CHANNEL, str(run_id))
        after_commit(tx, lambda: self._notified(str(run_id)))

    # -- reading

    def subscribe(
        self, run_id: UUID, *, after: Id | None, live_only: bool = False, modes: frozenset[str] | None = None
    ) -> Subscription:
        """Follow a run: batches of frames behind `after` (None: all), each in order; an empty batch when a heartbeat is due.

        Ends after the frame `end`, or when the run is over and the log has nothing more. `live_only` starts at what is
        published from now on. `modes` are stream modes as requested on the wire. The subscription counts from this call.
        """
        return Subscription(self, self._topic(run_id), run_id, after or START, live_only=live_only, modes=modes)

    async def read_after(self, run_id: UUID, after: Id, limit: int = 1000) -> list[Frame]:
        """Frames of a run behind an id, from the table."""
        async with self._database.pool.connection() as connection:
            rows = await (await connection.execute(READ, [run_id, *after, limit])).fetchall()
        return [Frame.make(row["epoch"], row["seq"], row["event"], row["data"].encode()) for row in rows]

    async def newest(self, run_id: UUID) -> Id:
        """Id of the last frame in the table."""
        async with self._database.pool.connection() as connection:
            row = await (await connection.execute(NEWEST, [run_id])).fetchone()
        return (row["epoch"], row["seq"]) if row else START

    def shut(self) -> None:
        """End all streams: the server stops. Clients come back with their last id."""
        self._stopping = True
        for topic in tuple(self._topics.values()):
            topic.wake()

    @property
    def stopping(self) -> bool:
        """Whether streams are to end."""
        return self._stopping

    # -- inner life

    async def run(self) -> None:
        """Flush and beat until cancelled; then flush what is left."""
        beat = asyncio.create_task(self._beat(), name="heartbeat")
        try:
            while True:
                await self._work.wait()
                await asyncio.sleep(self._window)
                await self._flush()
        finally:
            beat.cancel()
            await self._flush(patient=False)

    async def _beat(self) -> None:
        """One timer for all streams."""
        while True:
            await asyncio.sleep(self._heartbeat)
            for topic in tuple(self._topics.values()):
                topic.wake(tick=True)

    async def _flush(self, *, patient: bool = True) -> None:
        """Write what waits, for all runs, in one statement each round. A failure is retried; it never blocks a run."""
        delay = 0.1
        while self._dirty:
            writers = list(self._dirty.values())
            self._dirty.clear()
            self._work.clear()
            batches = [(w, w.take(FLUSH_EVENTS)) for w in writers]
            self._in_flight = asyncio.get_running_loop().create_future()
            written = False
            try:
                await self._write(batches)
                written = True
            except (DatabaseError, PoolTimeout) as error:
                log.warning("events_not_flushed", error=str(error), retry_in=delay)
            finally:
                for writer, frames in batches:
                    writer.flushed(frames) if written else writer.put_back(frames)
                self._in_flight.set_result(None)
                self._in_flight = None
            if not written:
                if not patient:
                    return
                await asyncio.sleep(delay)
                delay = min(delay * 2, 2.0)

    async def _write(self, batches: Iterable[tuple[RunWriter, list[Frame]]]) -> None:
        rows = [(w.run_id, f) for w, frames in batches for f in frames]
        if not rows:
            return
        ids = [str(run_id) for run_id in dict.fromkeys(run_id for run_id, _ in rows)]
        groups = [",".join(ids[i : i + NOTIFY_IDS]) for i in range(0, len(ids), NOTIFY_IDS)]
        columns = [
            [run_id for run_id, _ in rows],
            [f.epoch for _, f in rows],
            [f.seq for _, f in rows],
            [f.event for _, f in rows],
            [f.data.decode() for _, f in rows],
        ]
        async with self._database.pool.connection() as connection:
            await connection.execute(FLUSH, [*columns, EVENTS_CHANNEL, groups])

    async def settled(self) -> None:
        """Wait for the flush in flight, if there is one."""
        if self._in_flight is not None:
            await self._in_flight

    def mark(self, writer: RunWriter) -> None:
        """A writer has something to flush."""
        self._dirty[writer.run_id] = writer
        self._work.set()

    def unmark(self, writer: RunWriter) -> None:
        """A writer flushes by itself from here on."""
        if self._dirty.get(writer.run_id) is writer:
            del self._dirty[writer.run_id]

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

    def _notified(self, payload: str | None) -> None:
        """Something was written elsewhere, or (None) may have been."""
        topics = (
            self._topics.values()
            if payload is None
            else (t for id_ in payload.split(",") if (t := self._topics.get(UUID(id_))) is not None)
        )
        for topic in tuple(topics):
            if topic.channel is None:
                topic.wake(look=True)


async def _never(_: UUID) -> bool:
    return False
