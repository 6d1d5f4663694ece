"""The one door through which an item's status changes. Each change is a compare-and-set by the transition table, and leaves
an audit record and an event for the feed in the same transaction.

The caller holds the thread's row lock (lock order: thread, run, item).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.codec import clean, dumps, jsonable
from app.db.engine import hint
from app.errors import Conflict
from app.inbox.models import OPEN, TRANSITIONS, InboxItem, ItemStatus

CHANNEL = "keyturn_inbox"

RECORD = text("""
    WITH audited AS (
        INSERT INTO inbox_decisions (tenant_id, item_id, item_version, event, actor, via, cause, args_hash, detail)
        VALUES (:tenant, :item, :version, :audit, :actor, :via, :cause, :args_hash, CAST(:detail AS jsonb))
    )
    INSERT INTO inbox_events (tenant_id, item_id, event, data) VALUES (:tenant, :item, :event, CAST(:data AS jsonb))
""")


@dataclass(frozen=True, slots=True)
class By:
    """Who changes an item, on which way, and why: `human`, `rule`, `expiry` or `system`."""

    actor: str
    via: str
    cause: str = "system"
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def human(cls, principal: Principal, via: str, **detail: Any) -> By:
        """A person, or a program that decides for one."""
        return cls(principal.subject, via, "human", detail)

    @classmethod
    def engine(cls, run_id: UUID | None, reason: str, **detail: Any) -> By:
        """What follows from the end of a run."""
        return cls("system", "run", "system", {"reason": reason, "run_id": str(run_id) if run_id else None, **detail})


async def lock(tx: AsyncSession, thread_id: UUID, statuses: Collection[ItemStatus] = OPEN) -> list[InboxItem]:
    """The thread's items in these statuses, locked, oldest first. Always in this order, so that nobody waits in a circle."""
    rows = await tx.scalars(
        select(InboxItem)
        .where(InboxItem.thread_id == thread_id, InboxItem.status.in_(statuses))
        .order_by(InboxItem.id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    return list(rows.all())


async def add(tx: AsyncSession, item: InboxItem, by: By) -> InboxItem:
    """A new question, pending."""
    item.status = ItemStatus.pending
    tx.add(item)
    await tx.flush()
    await _record(tx, item, "created", "created", by)
    return item


async def move(tx: AsyncSession, item: InboxItem, to: ItemStatus, by: By, *, audit: str | None = None, **values: Any) -> None:
    """Bring the item to another status. `audit` names what happened where that is not the status' own name."""
    before = ItemStatus(item.status)
    if to not in TRANSITIONS[before]:
        raise AssertionError(f"item status {before} → {to}")
    changed = await tx.scalar(
        update(InboxItem)
        .where(InboxItem.id == item.id, InboxItem.status == before, InboxItem.version == item.version)
        .values(status=to, version=InboxItem.version + 1, updated_at=func.clock_timestamp(), **values)
        .returning(InboxItem)
        .execution_options(populate_existing=True, synchronize_session=False)
    )
    if changed is None:
        raise Conflict("The item changed at the same moment. Read it again.", code="stale_version")
    event = "updated" if to in OPEN else "closed"
    await _record(tx, item, "decided" if to is ItemStatus.decided else event, audit or to.value, by)


async def sent(tx: AsyncSession, items: list[InboxItem], run_id: UUID) -> None:
    """The run that will carry the answers, where no run has taken them yet. No change of status."""
    waiting = [item.id for item in items if item.status == ItemStatus.decided]
    if waiting:
        await tx.execute(
            update(InboxItem)
            .where(InboxItem.id.in_(waiting))
            .values(resume_run_id=run_id)
            .execution_options(synchronize_session="evaluate")
        )


def item_json(item: InboxItem) -> dict[str, Any]:
    """The item as everybody sees it: in answers, in errors, in the feed."""
    path = f"/inbox/{item.id}"
    links = {"self": path, "response": f"{path}/response", "history": f"{path}/history", "thread": f"/threads/{item.thread_id}"}
    if item.run_id is not None:
        links["run"] = f"/threads/{item.thread_id}/runs/{item.run_id}"
    if item.resume_run_id is not None:
        links["resume_run"] = f"/threads/{item.thread_id}/runs/{item.resume_run_id}"
    shown: dict[str, Any] = jsonable({name: getattr(item, name) for name in SHOWN} | {"links": links})
    return shown


SHOWN = (
    "id",
    "version",
    "status",
    "kind",
    "thread_id",
    "run_id",
    "assistant_id",
    "assistant_version",
    "graph_id",
    "interrupt_id",
    "tool",
    "tool_call_id",
    "path",
    "action_request",
    "config",
    "description",
    "args_schema",
    "args_hash",
    "bound",
    "value",
    "copied_from",
    "created_at",
    "updated_at",
    "decided_at",
    "settled_at",
    "decision",
    "outcome",
    "resume_run_id",
)


async def _record(tx: AsyncSession, item: InboxItem, event: str, audit: str, by: By) -> None:
    await tx.execute(
        RECORD,
        {
            "tenant": item.tenant_id,
            "item": item.id,
            "version": item.version,
            "audit": audit,
            "event": event,
            "actor": by.actor,
            "via": by.via,
            "cause": by.cause,
            "args_hash": (item.decision or {}).get("args_hash") or item.args_hash,
            "detail": dumps(clean(by.detail)).decode(),
            "data": dumps(item_json(item)).decode(),
        },
    )
    hint(tx, CHANNEL)
