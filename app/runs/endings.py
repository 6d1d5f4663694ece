"""How runs ended, from their rows: for readers whose events are not kept any more, or not to be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson
from sqlalchemy import text

from app.codec import dumps
from app.db.engine import Database
from app.runs.models import Run, StopReason
from app.streaming.channel import GAP, Frame
from app.streaming.store import Reason

LAST_SEQ = 2**31 - 1
"""Ids of what is told of such a run lie behind all that it can have had."""
ENDED = """
SELECT asked.id, coalesce(extract(epoch FROM now() - r.finished_at), 0)::float8 AS seconds
FROM unnest(%b::uuid[]) AS asked (id) LEFT JOIN runs r ON r.id = asked.id
WHERE r.id IS NULL OR r.status NOT IN ('pending', 'running')
"""
VALUES = text("""
SELECT "values"::text, interrupts::text FROM threads WHERE id = :id AND (CAST(:run AS uuid) IS NULL OR NOT EXISTS (
    SELECT 1 FROM runs later JOIN runs mine ON mine.id = :run
    WHERE later.thread_id = :id AND later.started_at > mine.started_at
))
""")


@dataclass(frozen=True, slots=True)
class RunEndings:
    """Implements `Endings` for the event log."""

    database: Database

    async def ended(self, run_ids: Sequence[UUID]) -> dict[UUID, float]:
        """See Endings. Runs that are not there any more were rolled back or deleted."""
        async with self.database.pool.connection() as connection:
            rows = await (await connection.execute(ENDED, [list(run_ids)])).fetchall()
        return {row["id"]: max(0.0, row["seconds"]) for row in rows}

    async def told(self, run_id: UUID, reason: Reason) -> list[Frame]:
        """See Endings."""
        async with self.database.transaction() as tx:
            run = await tx.get(Run, run_id)
            row = (await tx.execute(VALUES, {"id": run.thread_id, "run": run_id})).first() if run else None
        if run is None:
            return []
        values, interrupts = row or (None, None)
        if interrupts and run.stop_reason in (StopReason.human_input, StopReason.breakpoint):
            asked = [
                {"response_schema": None} | interrupt for of_task in orjson.loads(interrupts).values() for interrupt in of_task
            ]
            values = dumps({**orjson.loads(values or "{}"), "__interrupt__": asked}).decode()
        return _told(run, values.encode() if values else None, reason)

    async def values(self, thread_id: UUID) -> bytes | None:
        """The thread's values as JSON, for a result whose stream had none."""
        async with self.database.transaction() as tx:
            row = (await tx.execute(VALUES, {"id": thread_id, "run": None})).first()
        return row[0].encode() if row and row[0] else None


def _told(run: Run, values: bytes | None, reason: Reason) -> list[Frame]:
    events: list[tuple[str, bytes]] = [
        ("metadata", dumps({"run_id": run.id, "attempt": run.attempts})),
        (GAP, dumps({"run_id": run.id, "events": None, "reason": reason})),
    ]
    if values is not None:
        events.append(("values", values))
    if run.error is not None:
        events.append(("error", dumps(run.error)))
    events.append(("end", dumps({"run_id": run.id, "status": run.status, "stop_reason": run.stop_reason})))
    return [Frame.make(run.epoch, LAST_SEQ - len(events) + i, event, data) for i, (event, data) in enumerate(events, 1)]
