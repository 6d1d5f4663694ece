"""Reading the inbox: one item, pages that stay stable while items come and go, counts, and the audit of an item."""

from __future__ import annotations

import base64
import binascii
import re
from datetime import datetime
from uuid import UUID

from sqlalchemy import or_, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal, owned
from app.errors import Conflict, Invalid, NotFound
from app.inbox.items import item_json
from app.inbox.models import OPEN, InboxDecision, InboxItem, ItemStatus
from app.inbox.schemas import AuditRecord, Counts, ItemQuery

INTERRUPT_ID = re.compile(r"[0-9a-zA-Z_:-]{1,128}")


WAITING = text("SELECT EXISTS (SELECT 1 FROM inbox_items WHERE thread_id = :thread AND status IN ('pending', 'decided'))")


async def find(tx: AsyncSession, principal: Principal, ref: str, *, exact: bool = False) -> InboxItem:
    """An item by its id or its interrupt's. NotFound for what is another tenant's.

    Several items may have one interrupt id: a question asked again, copies of a thread. Then the open one is meant, else the
    newest; with `exact`, Conflict if that could be another question than the one that was read.
    """
    rows = await tx.scalars(
        owned(InboxItem, principal)
        .where(or_(InboxItem.id == _uuid(ref), InboxItem.interrupt_id == (ref if INTERRUPT_ID.fullmatch(ref) else None)))
        .order_by(InboxItem.created_at.desc(), InboxItem.id.desc())
    )
    found = list(rows.all())
    if not found:
        raise NotFound(f"There is no inbox item {ref[:100]}.", code="item_not_found")
    if found[0].id == _uuid(ref):
        return found[0]
    item = next((i for i in found if i.status in OPEN), found[0])
    if exact and item.status == ItemStatus.pending and any(_other(item, i) for i in found):
        raise Conflict(
            f"The interrupt id {ref} belongs to several questions. Answer by the item's id.",
            code="ambiguous_id",
            items=[item_json(i) for i in found],
        )
    return item


async def page(tx: AsyncSession, principal: Principal, query: ItemQuery) -> tuple[list[InboxItem], str | None]:
    """Items that match, oldest first, and the cursor of the next page."""
    statement = owned(InboxItem, principal)
    if "all" not in query.status:
        statement = statement.where(InboxItem.status.in_(query.status))
    if query.tool is not None:
        statement = statement.where(InboxItem.tool == query.tool)
    if query.assistant_id is not None:
        statement = statement.where(InboxItem.assistant_id == query.assistant_id)
    if query.thread_id is not None:
        statement = statement.where(InboxItem.thread_id == query.thread_id)
    if query.cursor is not None:
        statement = statement.where(tuple_(InboxItem.created_at, InboxItem.id) > tuple_(*_position(query.cursor)))
    statement = statement.order_by(InboxItem.created_at, InboxItem.id).limit(query.limit + 1)
    found = list((await tx.scalars(statement)).all())
    if len(found) <= query.limit:
        return found, None
    found.pop()
    return found, cursor(found[-1])


async def counts(tx: AsyncSession, principal: Principal) -> Counts:
    """Counts of the tenant's items."""
    rows = await tx.execute(
        text("""
            SELECT 'tool' AS by, tool AS key, count(*) AS n FROM inbox_items
                WHERE tenant_id = :tenant AND status = 'pending' AND tool IS NOT NULL GROUP BY tool
            UNION ALL SELECT 'assistant', assistant_id::text, count(*) FROM inbox_items
                WHERE tenant_id = :tenant AND status = 'pending' GROUP BY assistant_id
            UNION ALL SELECT 'status', status, count(*) FROM inbox_items WHERE tenant_id = :tenant GROUP BY status
        """),
        {"tenant": principal.tenant},
    )
    by: dict[str, dict[str, int]] = {"tool": {}, "assistant": {}, "status": {}}
    for row in rows:
        by[row.by][row.key] = row.n
    pending = by["status"].get(ItemStatus.pending, 0)
    return Counts(total=pending, by_tool=by["tool"], by_assistant=by["assistant"], by_status=by["status"])


async def history(tx: AsyncSession, principal: Principal, item: InboxItem) -> list[AuditRecord]:
    """What happened to an item, oldest first."""
    rows = await tx.scalars(owned(InboxDecision, principal).where(InboxDecision.item_id == item.id).order_by(InboxDecision.id))
    return [
        AuditRecord(
            id=row.id,
            event=row.event,
            item_version=row.item_version,
            actor=row.actor,
            via=row.via,
            cause=row.cause,
            args_hash=row.args_hash,
            detail=row.detail,
            at=row.created_at,
        )
        for row in rows
    ]


async def mark_seen(
    tx: AsyncSession, principal: Principal, *, thread_id: UUID | None = None, item_id: UUID | None = None
) -> None:
    """Pending questions were delivered to the principal. Writes only what is new, and no new version."""
    where = InboxItem.thread_id == thread_id if thread_id is not None else InboxItem.id == item_id
    unseen = (
        owned(InboxItem, principal)
        .where(where, InboxItem.status == ItemStatus.pending, ~InboxItem.seen_by.contains([principal.subject]))
        .with_only_columns(InboxItem.id)
    )
    # Most reads find nothing to write, and then lock nothing.
    ids = list((await tx.scalars(unseen)).all())
    if ids:
        await tx.execute(
            text("""
                UPDATE inbox_items SET seen_by = seen_by || CAST(:subject AS text) WHERE id IN (
                    SELECT id FROM inbox_items WHERE id = ANY(:ids) AND NOT CAST(:subject AS text) = ANY(seen_by)
                    ORDER BY id FOR UPDATE
                )
            """),
            {"subject": principal.subject, "ids": ids},
        )


async def open_exists(tx: AsyncSession, thread_id: UUID) -> bool:
    """Whether a question on the thread waits for a human, or an answer for its run."""
    return bool(await tx.scalar(WAITING, {"thread": thread_id}))


def cursor(item: InboxItem) -> str:
    """The position behind an item, as an opaque text."""
    return base64.urlsafe_b64encode(f"{item.created_at.isoformat()}|{item.id.hex}".encode()).decode().rstrip("=")


def _position(value: str) -> tuple[datetime, UUID]:
    try:
        at, _, id_ = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).decode().partition("|")
        position = datetime.fromisoformat(at), UUID(hex=id_)
    except (binascii.Error, ValueError) as error:
        raise Invalid.field("cursor", "is not one that this server gave", code="invalid_cursor") from error
    if position[0].tzinfo is None:
        raise Invalid.field("cursor", "is not one that this server gave", code="invalid_cursor")
    return position


def _uuid(ref: str) -> UUID | None:
    try:
        return UUID(ref) if len(ref) == 36 else None
    except ValueError:
        return None


def _other(item: InboxItem, other: InboxItem) -> bool:
    """Whether somebody may have read `other` and mean that, where the id finds `item`."""
    if other is item:
        return False
    return other.thread_id != item.thread_id or other.value_hash != item.value_hash or other.decided_at is not None
