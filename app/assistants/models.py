"""Assistants and their immutable versions."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Json, MaybeTimestamp, Owned, Timestamp, Uuid7

SYSTEM_TENANT = "system"
"""Owner of the assistants that every tenant may read and none may change."""


class Assistant(Owned, Base):
    """A configuration of a graph. The row repeats its current version, so that a run needs one lookup."""

    __tablename__ = "assistants"
    __table_args__ = (Index(None, "tenant_id", "created_at", "id"), Index(None, "tenant_id", "name"))

    id: Mapped[Uuid7]
    graph_id: Mapped[str]
    name: Mapped[str]
    description: Mapped[str | None]
    config: Mapped[Json]
    context: Mapped[Json]
    metadata_: Mapped[Json] = mapped_column("metadata")
    version: Mapped[int] = mapped_column(default=1)
    created_at: Mapped[Timestamp]
    updated_at: Mapped[Timestamp]
    deleted_at: Mapped[MaybeTimestamp]  # versions stay: threads and items name them, and their numbers are never used again


class AssistantVersion(Base):
    """What an assistant was at one version. Runs and inbox items name the version that made them."""

    __tablename__ = "assistant_versions"

    assistant_id: Mapped[UUID] = mapped_column(ForeignKey("assistants.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    graph_id: Mapped[str]
    name: Mapped[str]
    description: Mapped[str | None]
    config: Mapped[Json]
    context: Mapped[Json]
    metadata_: Mapped[dict[str, Any]] = mapped_column("metadata")
    created_at: Mapped[Timestamp]
