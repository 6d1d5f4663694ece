"""Messages to webhooks: the table is the outbox, and later the log of what was delivered."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import DateTime, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, MaybeTimestamp, Owned, Timestamp, Uuid7


class DeliveryStatus(StrEnum):
    """A message is pending until it was received, or until it is given up."""

    pending = "pending"
    delivered = "delivered"
    failed = "failed"


class Delivery(Owned, Base):
    """One message to one address. `id` is its name for the receiver, the same in each attempt.

    Names its run without a foreign key: a run that was rolled back or deleted is still told of.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_due", "next_attempt_at", postgresql_where=text("status = 'pending'")),
        Index("ix_webhook_deliveries_run", "run_id"),
    )

    id: Mapped[Uuid7]
    run_id: Mapped[UUID]
    url: Mapped[str]
    event: Mapped[str]
    payload: Mapped[str]
    """JSON as it is sent, and so not `jsonb`, which would sort its keys."""
    status: Mapped[str] = mapped_column(server_default=DeliveryStatus.pending)
    attempts: Mapped[int] = mapped_column(server_default="0")
    next_attempt_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    """Also the end of the lease of a process that makes an attempt."""
    last_status: Mapped[int | None]
    last_error: Mapped[str | None]
    created_at: Mapped[Timestamp]
    delivered_at: Mapped[MaybeTimestamp]
