"""Threads: what a conversation is at rest. Its messages live in LangGraph's checkpoints."""

from __future__ import annotations

from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import Index
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import EMPTY_OBJECT, Base, Json, Owned, Timestamp, Uuid7


class ThreadStatus(StrEnum):
    """Status of a thread on the wire."""

    idle = "idle"
    busy = "busy"
    interrupted = "interrupted"
    error = "error"


class Thread(Owned, Base):
    """One conversation. `values` and `interrupts` repeat the last checkpoint, for searches."""

    __tablename__ = "threads"
    __table_args__ = (
        Index(None, "tenant_id", "updated_at", "id"),
        Index("ix_threads_metadata", "metadata", postgresql_using="gin", postgresql_ops={"metadata": "jsonb_path_ops"}),
    )

    id: Mapped[Uuid7]
    status: Mapped[str] = mapped_column(default=ThreadStatus.idle)
    metadata_: Mapped[Json] = mapped_column("metadata", server_default=EMPTY_OBJECT)
    config: Mapped[Json] = mapped_column(server_default=EMPTY_OBJECT)
    values: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    interrupts: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    graph_id: Mapped[str | None]
    assistant_id: Mapped[UUID | None]
    assistant_version: Mapped[int | None]
    created_at: Mapped[Timestamp]
    updated_at: Mapped[Timestamp]
    state_updated_at: Mapped[Timestamp]
