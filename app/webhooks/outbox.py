"""The SQL of the outbox: add, claim, settle, tidy. Statuses of deliveries change nowhere else.

Each function works inside the caller's transaction. Only the database's clock counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from app.db.engine import hint

CHANNEL = "keyturn_webhooks"

ADD = text("""
INSERT INTO webhook_deliveries (id, tenant_id, run_id, url, event, payload)
VALUES (:id, :tenant_id, :run_id, :url, :event, :payload)
""")
# `host` is what stands between the slashes: enough to tell apart whom to spare.
CLAIM = text("""
UPDATE webhook_deliveries SET attempts = attempts + 1, next_attempt_at = now() + make_interval(secs => :lease)
WHERE id IN (
    SELECT id FROM webhook_deliveries
    WHERE status = 'pending' AND next_attempt_at <= now() AND split_part(url, '/', 3) <> ALL(:busy)
    ORDER BY next_attempt_at LIMIT :limit FOR UPDATE SKIP LOCKED
)
RETURNING id, run_id, url, split_part(url, '/', 3) AS host, payload, attempts
""")
NEXT = text("""
SELECT extract(epoch FROM min(next_attempt_at) - now())::float8 FROM webhook_deliveries
WHERE status = 'pending' AND split_part(url, '/', 3) <> ALL(:busy)
""")
DELIVERED = text("""
UPDATE webhook_deliveries SET status = 'delivered', delivered_at = now(), last_status = :status, last_error = NULL
WHERE id = :id AND status <> 'delivered'
""")
# Under the attempt's number: an attempt that was overtaken by another says nothing any more.
FAILED = text("""
UPDATE webhook_deliveries SET last_status = :status, last_error = :error,
    status = CASE WHEN CAST(:again AS float8) IS NULL THEN 'failed' ELSE status END,
    next_attempt_at = coalesce(now() + make_interval(secs => CAST(:again AS float8)), next_attempt_at)
WHERE id = :id AND attempts = :attempts AND status = 'pending'
""")
TIDY = text("""
DELETE FROM webhook_deliveries
WHERE status <> 'pending' AND greatest(created_at, next_attempt_at) < now() - make_interval(secs => :keep)
""")


@dataclass(frozen=True, slots=True)
class Message:
    """A message whose next attempt is this process' to make, for as long as the lease lasts."""

    id: UUID
    run_id: UUID
    url: str
    host: str
    payload: str
    attempts: int


class Outbox:
    """Takes messages. Implements the port of the same name in `runs`."""

    async def add(self, tx: AsyncSession, *, tenant_id: str, run_id: UUID, url: str, event: str, payload: bytes) -> None:
        """Have a JSON object sent to `url` once the transaction has committed. Never without that, and never lost after it."""
        await tx.execute(
            ADD,
            {
                "id": uuid7(),
                "tenant_id": tenant_id,
                "run_id": run_id,
                "url": url,
                "event": event,
                "payload": payload.decode(),
            },
        )
        hint(tx, CHANNEL)


async def claim(tx: AsyncSession, *, limit: int, lease: float, busy: list[str]) -> list[Message]:
    """Claim up to `limit` messages that are due, to other hosts than `busy`, for `lease` seconds.

    If this process dies, they are due again when the lease ends.
    """
    rows = await tx.execute(CLAIM, {"limit": limit, "lease": lease, "busy": busy})
    return [Message(**row._mapping) for row in rows]


async def next_in(tx: AsyncSession, busy: list[str]) -> float | None:
    """Seconds until a message to another host than `busy` is due; None if there is none."""
    seconds: float | None = await tx.scalar(NEXT, {"busy": busy})
    return seconds


async def delivered(tx: AsyncSession, message: Message, status: int) -> None:
    """The receiver has it."""
    await tx.execute(DELIVERED, {"id": message.id, "status": status})


async def failed(tx: AsyncSession, message: Message, *, status: int | None, error: str, again: float | None) -> None:
    """An attempt failed. `again`: seconds until the next one, or None to give the message up."""
    await tx.execute(FAILED, {"id": message.id, "attempts": message.attempts, "status": status, "error": error, "again": again})


async def tidy(tx: AsyncSession, *, keep: float) -> None:
    """Delete messages that came to their end more than `keep` seconds ago."""
    await tx.execute(TIDY, {"keep": keep})
