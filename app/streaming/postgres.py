"""Events in Postgres: the table `run_events`, written with the run's own transaction at its end.

Readers in other processes are woken by NOTIFY, which carries ids only and is but a hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

import psycopg
from psycopg_pool import PoolTimeout
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import Database, driver_connection, hint
from app.db.listen import Listener
from app.streaming.channel import START, Channel, Frame, Id
from app.streaming.store import Batch, Woken

EVENTS_CHANNEL = "keyturn_events"
NOTIFY_IDS = 200
"""Run ids in one notification: Postgres takes less than 8000 bytes."""
READ_BYTES = 4 * 2**20

# One round trip. `set_config` is evaluated before the commit, so that this commit does not wait for the disk: after a crash
# of Postgres the last moments of a stream may be missing, never its end, which is written with the run's own transaction.
APPEND = """
WITH relaxed AS (SELECT set_config('synchronous_commit', 'off', true)),
written AS (
    INSERT INTO run_events (run_id, epoch, seq, event, data)
    SELECT e.* FROM unnest(%b::uuid[], %b::int[], %b::int[], %b::text[], %b::text[]) AS e (run_id, epoch, seq, event, data)
    JOIN runs r ON r.id = e.run_id AND r.epoch = e.epoch
    ON CONFLICT DO NOTHING
)
SELECT pg_notify(%s, ids) FROM unnest(%b::text[]) AS ids, relaxed
"""
FINISH = """
INSERT INTO run_events (run_id, epoch, seq, event, data)
SELECT %b::uuid, e.* FROM unnest(%b::int[], %b::int[], %b::text[], %b::text[]) AS e
ON CONFLICT DO NOTHING
"""
CLOSE = text("""
INSERT INTO run_events (run_id, epoch, seq, event, data)
SELECT :run_id, coalesce(max(epoch), 0), coalesce(max(seq), 0) + 1, 'end', :data
FROM (SELECT epoch, seq FROM run_events WHERE run_id = :run_id ORDER BY epoch DESC, seq DESC LIMIT 1) AS last
ON CONFLICT DO NOTHING
""")
READ = """
SELECT epoch, seq, event, data FROM (
    SELECT *, sum(octet_length(data)) OVER (ORDER BY epoch, seq) - octet_length(data) AS bytes_before FROM (
        SELECT epoch, seq, event, data FROM run_events
        WHERE run_id = %s AND (epoch, seq) > (%s, %s) ORDER BY epoch, seq LIMIT %s
    ) AS following
) AS summed WHERE bytes_before < %s ORDER BY epoch, seq
"""
NEWEST = "SELECT epoch, seq FROM run_events WHERE run_id = %s ORDER BY epoch DESC, seq DESC LIMIT 1"
BEHIND = """
SELECT p.run_id FROM unnest(%b::uuid[], %b::bigint[], %b::bigint[]) AS p (run_id, epoch, seq), LATERAL (
    SELECT 1 FROM run_events e WHERE e.run_id = p.run_id AND (e.epoch, e.seq) > (p.epoch, p.seq) LIMIT 1
) AS further
"""


class PostgresStore:
    """The store that needs nothing but the database. Fences by the epoch in the run's row."""

    atomic = True
    outages: tuple[type[Exception], ...] = (psycopg.Error, PoolTimeout, DBAPIError)

    def __init__(self, database: Database, listener: Listener) -> None:
        self._database = database
        self._listener = listener

    def attach(self, woken: Woken) -> None:
        """See EventStore."""

        def notified(payload: str | None) -> None:
            woken(None if payload is None else [UUID(id_) for id_ in payload.split(",")], True)

        self._listener.subscribe(EVENTS_CHANNEL, notified)

    async def run(self) -> None:
        """The listener works for all."""
        await asyncio.Event().wait()

    async def append(self, batches: Sequence[Batch]) -> None:
        """See EventStore. One statement, which also tells others."""
        ids = list(dict.fromkeys(str(run_id) for run_id, _ in batches))
        groups = [",".join(ids[i : i + NOTIFY_IDS]) for i in range(0, len(ids), NOTIFY_IDS)]
        rows = [(run_id, *f.id, f.event, f.data.decode()) for run_id, frames in batches for f in frames]
        columns = [list(column) for column in zip(*rows, strict=True)]
        async with self._database.pool.connection() as connection:
            await connection.execute(APPEND, [*columns, EVENTS_CHANNEL, groups])

    async def read(self, run_id: UUID, after: Id, limit: int) -> list[Frame]:
        """See EventStore."""
        async with self._database.pool.connection() as connection:
            rows = await (await connection.execute(READ, [run_id, *after, limit, READ_BYTES])).fetchall()
        return [Frame.make(row["epoch"], row["seq"], row["event"], row["data"].encode()) for row in rows]

    async def newest(self, run_id: UUID) -> Id:
        """See EventStore."""
        async with self._database.pool.connection() as connection:
            row = await (await connection.execute(NEWEST, [run_id])).fetchone()
        return (row["epoch"], row["seq"]) if row else START

    async def behind(self, positions: Mapping[UUID, Id]) -> Iterable[UUID]:
        """See EventStore. Any notification may have been missed."""
        columns = [list(positions), [epoch for epoch, _ in positions.values()], [seq for _, seq in positions.values()]]
        async with self._database.pool.connection() as connection:
            return [row["run_id"] for row in await (await connection.execute(BEHIND, columns)).fetchall()]

    async def finish(self, tx: AsyncSession, run_id: UUID, frames: Sequence[Frame]) -> None:
        """See EventStore. Durable."""
        rows = [(*f.id, f.event, f.data.decode()) for f in frames]
        connection = await driver_connection(tx)
        await connection.execute(FINISH, [run_id, *(list(column) for column in zip(*rows, strict=True))])

    async def close(self, tx: AsyncSession, run_id: UUID, data: bytes) -> None:
        """See EventStore."""
        await tx.execute(CLOSE, {"run_id": run_id, "data": data.decode()})
        hint(tx, EVENTS_CHANNEL, str(run_id))

    def written(self, run_id: UUID) -> None:
        """See EventStore."""
        self._database.notifier.send([(EVENTS_CHANNEL, str(run_id))])

    def follow(self, run_id: UUID, after: Id) -> Channel | None:
        """See EventStore. Notifications tell when to read."""
        return None

    def unfollow(self, run_id: UUID) -> None:
        """See EventStore."""
