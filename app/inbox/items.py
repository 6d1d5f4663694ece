"""The one door through which an item's status changes. Each change is a compare-and-set by the transition table, and leaves
an audit record and an event for the feed in the same transaction.

The caller holds the thread's row lock (lock order: thread, run, item).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import UUID

from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.attributes import set_committed_value

from app.auth import Principal
from app.codec import clean, dumps, jsonable
from app.db.engine import driver_connection, hint
from app.errors import Conflict
from app.inbox.models import OPEN, TRANSITIONS, InboxItem, ItemStatus

CHANNEL = "keyturn_inbox"

# The change, its audit record and its event for the feed are one statement.
RECORDED = """
), audited AS (
    INSERT INTO inbox_decisions (tenant_id, item_id, item_version, event, actor, via, cause, args_hash, detail)
    SELECT %(tenant)s, id, %(new_version)s, %(audit)s, %(actor)s, %(via)s, %(cause)s, %(args)s, %(detail)s::jsonb FROM changed
)
INSERT INTO inbox_events (tenant_id, item_id, event, data)
SELECT %(tenant)s, id, %(event)s, %(data)s::jsonb FROM changed RETURNING item_id
"""
LOCK = "SELECT * FROM inbox_items WHERE thread_id = %s AND status = ANY(%s) ORDER BY id FOR UPDATE"
SENT = "UPDATE inbox_items SET resume_run_id = %s WHERE id = ANY(%s)"
JSON = frozenset({"action_request", "config", "value", "args_schema", "decision", "outcome"})
COLUMNS = tuple(column.key for column in InboxItem.__table__.columns)


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
    """The thread's items in these statuses, locked, oldest first. Always in this order, so that nobody waits in a circle.

    They belong to no session: what is set on them is written by the functions here alone.
    """
    connection = await driver_connection(tx)
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(LOCK, [thread_id, [status.value for status in statuses]])
        return [InboxItem(**row) for row in await cursor.fetchall()]


async def add(tx: AsyncSession, item: InboxItem, by: By) -> InboxItem:
    """A new question, pending."""
    item.status, item.version = ItemStatus.pending, 1
    item.created_at = item.updated_at = datetime.now(UTC)
    params = {column: _param(column, getattr(item, column)) for column in COLUMNS}
    await _change(tx, ADD, item, params, "created", "created", by)
    return item


async def move(tx: AsyncSession, item: InboxItem, to: ItemStatus, by: By, *, audit: str | None = None, **values: Any) -> None:
    """Bring the item to another status. `audit` names what happened where that is not the status' own name."""
    before, version = ItemStatus(item.status), item.version
    if to not in TRANSITIONS[before]:
        raise AssertionError(f"item status {before} → {to}")
    new = {"status": to, "version": version + 1, "updated_at": datetime.now(UTC), **values}
    for name, value in new.items():
        set_committed_value(item, name, value)
    params = {f"new_{name}": _param(name, value) for name, value in new.items()}
    params |= {"item": item.id, "before": before, "old_version": version}
    event = "updated" if to in OPEN else "closed"
    event = "decided" if to is ItemStatus.decided else event
    if not await _change(tx, _move(tuple(new)), item, params, event, audit or to.value, by):
        raise Conflict("The item changed at the same moment. Read it again.", code="stale_version")


async def sent(tx: AsyncSession, items: list[InboxItem], run_id: UUID) -> None:
    """The run that will carry the answers, where no run has taken them yet. No change of status."""
    waiting = [item for item in items if item.status == ItemStatus.decided]
    if waiting:
        await (await driver_connection(tx)).execute(SENT, [run_id, [item.id for item in waiting]])
        for item in waiting:
            set_committed_value(item, "resume_run_id", run_id)


@cache
def _move(names: tuple[str, ...]) -> str:
    sets = ", ".join(f"{name} = {_placeholder(name, f'new_{name}')}" for name in names)
    return f"""
WITH changed AS (
    UPDATE inbox_items SET {sets} WHERE id = %(item)s AND status = %(before)s AND version = %(old_version)s RETURNING id
{RECORDED}"""


def _placeholder(column: str, name: str) -> str:
    return f"%({name})s::jsonb" if column in JSON else f"%({name})s"


def _param(column: str, value: Any) -> Any:
    if column in JSON:
        return None if value is None and column != "value" else dumps(value).decode()
    return value


ADD = f"""
WITH changed AS (
    INSERT INTO inbox_items ({", ".join(COLUMNS)}) VALUES ({", ".join(_placeholder(c, c) for c in COLUMNS)}) RETURNING id
{RECORDED}"""


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


async def _change(
    tx: AsyncSession, statement: str, item: InboxItem, params: dict[str, Any], event: str, audit: str, by: By
) -> bool:
    """Carry out a change with its records. False if the item was not as it was known."""
    params |= {
        "tenant": item.tenant_id,
        "new_version": item.version,
        "audit": audit,
        "event": event,
        "actor": by.actor,
        "via": by.via,
        "cause": by.cause,
        "args": (item.decision or {}).get("args_hash") or item.args_hash,
        "detail": dumps(clean(by.detail)).decode(),
        "data": dumps(item_json(item)).decode(),
    }
    done = await (await driver_connection(tx)).execute(statement, params)
    hint(tx, CHANNEL)
    return await done.fetchone() is not None
