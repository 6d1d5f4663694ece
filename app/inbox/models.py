"""The inbox: one row per question, its append-only decisions, and the permits that let a gated tool run."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, DateTime, Identity, Index, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TEXT
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import EMPTY_LIST, XID8, Base, Json, MaybeTimestamp, Owned, Timestamp, Uuid7


class ItemStatus(StrEnum):
    """`pending → decided → resuming → settled`, or `failed`, or one of the three ends without a decision."""

    pending = "pending"
    decided = "decided"
    resuming = "resuming"
    settled = "settled"
    failed = "failed"
    expired = "expired"
    superseded = "superseded"
    withdrawn = "withdrawn"


OPEN = frozenset({ItemStatus.pending, ItemStatus.decided, ItemStatus.resuming})

TRANSITIONS: dict[ItemStatus, frozenset[ItemStatus]] = {
    ItemStatus.pending: frozenset({ItemStatus.decided, ItemStatus.expired, ItemStatus.superseded, ItemStatus.withdrawn}),
    ItemStatus.decided: frozenset({ItemStatus.resuming, ItemStatus.pending, ItemStatus.superseded, ItemStatus.withdrawn}),
    ItemStatus.resuming: frozenset(
        {ItemStatus.settled, ItemStatus.failed, ItemStatus.pending, ItemStatus.superseded, ItemStatus.withdrawn}
    ),
    ItemStatus.failed: frozenset({ItemStatus.pending, ItemStatus.withdrawn}),
    **{s: frozenset() for s in (ItemStatus.settled, ItemStatus.expired, ItemStatus.superseded, ItemStatus.withdrawn)},
}


class InboxItem(Owned, Base):
    """A question that an agent asks a human. It outlives the thread, so that its history can be read."""

    __tablename__ = "inbox_items"
    __table_args__ = (
        # One open item per question: the same interrupt id with another value is another question.
        Index(
            "uq_inbox_items_open",
            "thread_id",
            "interrupt_id",
            "value_hash",
            unique=True,
            postgresql_where=text("status in ('pending', 'decided', 'resuming')"),
        ),
        Index("ix_inbox_items_list", "tenant_id", "status", "created_at", "id"),
        Index("ix_inbox_items_thread", "thread_id"),
        Index("ix_inbox_items_interrupt", "interrupt_id"),
    )

    id: Mapped[Uuid7]
    version: Mapped[int] = mapped_column(default=1)
    status: Mapped[str] = mapped_column(default=ItemStatus.pending)
    kind: Mapped[str]  # tool | question | breakpoint | raw
    thread_id: Mapped[UUID]
    run_id: Mapped[UUID | None]  # the run that asked, where it is known
    copied_from: Mapped[UUID | None]  # the thread that this one is a copy of
    assistant_id: Mapped[UUID]
    assistant_version: Mapped[int]
    graph_id: Mapped[str]
    interrupt_id: Mapped[str]
    value_hash: Mapped[str]
    task_id: Mapped[str | None]
    path: Mapped[list[str]] = mapped_column(ARRAY(TEXT), server_default=EMPTY_LIST)
    message_id: Mapped[str | None]
    call_index: Mapped[int | None]
    tool_call_id: Mapped[str | None]
    tool: Mapped[str | None]
    action_request: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    config: Mapped[Json]
    description: Mapped[str | None]
    value: Mapped[Any] = mapped_column(JSONB)
    args_schema: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    args_hash: Mapped[str | None]
    bound: Mapped[bool] = mapped_column(default=False)
    seen_by: Mapped[list[str]] = mapped_column(ARRAY(TEXT), server_default=EMPTY_LIST)
    decision: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    outcome: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    resume_run_id: Mapped[UUID | None]
    idempotency_key: Mapped[str | None]
    idempotency_hash: Mapped[str | None]
    created_at: Mapped[Timestamp]
    updated_at: Mapped[Timestamp]
    decided_at: Mapped[MaybeTimestamp]
    settled_at: Mapped[MaybeTimestamp]


class InboxDecision(Owned, Base):
    """The audit: what was done to an item, by whom, how. A trigger refuses every update and delete."""

    __tablename__ = "inbox_decisions"
    __table_args__ = (Index(None, "tenant_id", "item_id", "id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    item_id: Mapped[UUID]
    item_version: Mapped[int]
    event: Mapped[str]  # created | decided | settled | failed | superseded | withdrawn | revoked
    actor: Mapped[str]
    via: Mapped[str]
    cause: Mapped[str]  # human | rule | expiry | system
    args_hash: Mapped[str | None]
    detail: Mapped[Json]
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=text("clock_timestamp()"))


class InboxEvent(Owned, Base):
    """What the live feed sends. `xid` lets a reader wait for slower transactions, so that no event is ever skipped."""

    __tablename__ = "inbox_events"
    __table_args__ = (Index(None, "tenant_id", "xid", "id"), Index("ix_inbox_events_feed", "xid", "id"))

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    xid: Mapped[int] = mapped_column(XID8, server_default=text("pg_current_xact_id()"))
    item_id: Mapped[UUID]
    event: Mapped[str]  # created | updated | decided | closed
    data: Mapped[Json]
    created_at: Mapped[Timestamp]


class EffectPermit(Owned, Base):
    """Leave to carry out one gated call once. State never authorises: without an unspent permit the call asks again."""

    __tablename__ = "effect_permits"

    thread_id: Mapped[UUID] = mapped_column(primary_key=True)
    message_id: Mapped[str] = mapped_column(primary_key=True)
    call_index: Mapped[int] = mapped_column(primary_key=True)
    args_hash: Mapped[str]
    item_id: Mapped[UUID]
    created_at: Mapped[Timestamp]
    spent_at: Mapped[MaybeTimestamp]
    spent_run_id: Mapped[UUID | None]
    spent_epoch: Mapped[int | None]
    receipt: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
