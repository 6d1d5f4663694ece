"""Effect permits: a gated call runs only if it spends one that a decision created. State never authorises.

Keys are the AI message's id and the call's index in it, never the provider's call id, which some providers use twice.
"""

from __future__ import annotations

from typing import Any, Literal
from uuid import UUID

from sqlalchemy import delete, exists, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import clean, dumps, jsonable
from app.db.engine import Database
from app.graphs.review import GatedCall, LeaseLost, Receipt
from app.inbox.models import EffectPermit, InboxItem

MINE = """
    thread_id = %(thread)s AND message_id = %(message)s AND call_index = %(index)s AND args_hash = %(hash)s
"""

SPEND = f"""
    UPDATE effect_permits SET spent_at = clock_timestamp(), spent_run_id = %(run)s, spent_epoch = %(epoch)s
    WHERE {MINE} AND spent_at IS NULL AND (%(run)s::uuid IS NULL OR EXISTS (
        SELECT 1 FROM runs WHERE id = %(run)s AND thread_id = %(thread)s AND status = 'running'
          AND (%(epoch)s::int IS NULL OR epoch = %(epoch)s)
    ))
    RETURNING item_id
"""

LOOK = f"SELECT spent_at IS NOT NULL AS spent, receipt FROM effect_permits WHERE {MINE}"

KEEP = f"""
    UPDATE effect_permits SET receipt = %(receipt)s::jsonb
    WHERE {MINE} AND spent_run_id IS NOT DISTINCT FROM %(run)s::uuid AND spent_epoch IS NOT DISTINCT FROM %(epoch)s::int
"""

RETURN = f"""
    UPDATE effect_permits SET spent_at = NULL, spent_run_id = NULL, spent_epoch = NULL
    WHERE {MINE} AND receipt IS NULL AND spent_at IS NOT NULL
      AND spent_run_id IS NOT DISTINCT FROM %(run)s::uuid AND spent_epoch IS NOT DISTINCT FROM %(epoch)s::int
"""


class PostgresEffectGate:
    """Implements `graphs.review.EffectGate`. Every call is one committed statement of its own."""

    def __init__(self, database: Database) -> None:
        self._pool = database.pool

    async def spend(self, call: GatedCall) -> Literal["granted", "absent", "unknown"] | Receipt:
        """Take the permit, once, for the holder of the run's lease.

        `granted`: run the call now. `absent`: ask a human. A Receipt: it ran, here is what it said. `unknown`: it was
        started before and nobody knows how it ended. Raises LeaseLost, and leaves the permit, when the run was taken over.
        """
        params = _params(call)
        async with self._pool.connection() as connection:
            if await (await connection.execute(SPEND, params)).fetchone() is not None:
                return "granted"
            known = await (await connection.execute(LOOK, params)).fetchone()
        if known is None:
            return "absent"
        if known["receipt"] is not None:
            return Receipt(known["receipt"])
        if known["spent"]:
            return "unknown"
        raise LeaseLost(f"Run {call.run_id} is not held under epoch {call.epoch} any more.")

    async def receipt(self, call: GatedCall, message: dict[str, Any]) -> None:
        """Keep the tool message of a call that was carried out, whoever holds the run by now."""
        await self._execute(KEEP, {**_params(call), "receipt": dumps(clean(jsonable(message))).decode()})

    async def release(self, call: GatedCall) -> None:
        """Give the permit back: the call itself paused, and will be made again."""
        await self._execute(RETURN, _params(call))

    async def _execute(self, statement: str, params: dict[str, Any]) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(statement, params)


async def mint(tx: AsyncSession, item: InboxItem, args_hash: str) -> None:
    """Leave to carry out the item's call once, with these arguments."""
    await tx.execute(
        insert(EffectPermit)
        .values(
            tenant_id=item.tenant_id,
            thread_id=item.thread_id,
            message_id=item.message_id,
            call_index=item.call_index,
            args_hash=args_hash,
            item_id=item.id,
        )
        .on_conflict_do_update(
            index_elements=[EffectPermit.thread_id, EffectPermit.message_id, EffectPermit.call_index],
            set_={"args_hash": args_hash, "item_id": item.id, "created_at": func.now()},
            where=EffectPermit.spent_at.is_(None),
        )
    )


async def revoke(tx: AsyncSession, item: InboxItem) -> None:
    """Take back an unspent permit of the item."""
    await tx.execute(delete(EffectPermit).where(EffectPermit.item_id == item.id, EffectPermit.spent_at.is_(None)))


async def forget(tx: AsyncSession, thread_id: UUID) -> None:
    """The thread is gone, and with it everything that could spend a permit."""
    await tx.execute(delete(EffectPermit).where(EffectPermit.thread_id == thread_id))


async def outcome_unknown(tx: AsyncSession, item: InboxItem) -> bool:
    """Whether the item's call was started and left no receipt."""
    found = await tx.scalar(
        select(
            exists().where(EffectPermit.item_id == item.id, EffectPermit.spent_at.is_not(None), EffectPermit.receipt.is_(None))
        )
    )
    return bool(found)


async def spent(tx: AsyncSession, item: InboxItem) -> EffectPermit | None:
    """The spent permit of the item's call on its thread, whichever item it came from."""
    return await tx.scalar(
        select(EffectPermit).where(
            EffectPermit.thread_id == item.thread_id,
            EffectPermit.message_id == item.message_id,
            EffectPermit.call_index == item.call_index,
            EffectPermit.spent_at.is_not(None),
        )
    )


async def spent_in_source(tx: AsyncSession, item: InboxItem) -> bool:
    """Whether a thread that this one was copied from, at any remove, has carried the call out already."""
    found = await tx.scalar(
        text("""
            WITH RECURSIVE lineage AS (
                SELECT CAST(:source AS uuid) AS thread_id
                UNION
                SELECT i.copied_from FROM inbox_items i JOIN lineage l ON i.thread_id = l.thread_id
                WHERE i.copied_from IS NOT NULL AND i.message_id = :message
            )
            SELECT 1 FROM effect_permits p JOIN lineage l ON p.thread_id = l.thread_id
            WHERE p.message_id = :message AND p.call_index = :index AND p.spent_at IS NOT NULL LIMIT 1
        """),
        {"source": item.copied_from, "message": item.message_id, "index": item.call_index},
    )
    return found is not None


def _params(call: GatedCall) -> dict[str, Any]:
    return {
        "thread": UUID(call.thread_id),
        "message": call.message_id,
        "index": call.index,
        "hash": call.args_hash,
        "run": UUID(call.run_id) if call.run_id else None,
        "epoch": call.epoch,
    }
