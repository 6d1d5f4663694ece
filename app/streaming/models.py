"""What clients saw of a run: an append-only log, keyed by run, epoch and sequence."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Timestamp


class RunEvent(Base):
    """One event. `data` is the JSON text exactly as it went to the client; no reader ever follows a global id.

    Partitioned by the run's id, a UUIDv7, and so by the time of the run. See `retention.py`.
    """

    __tablename__ = "run_events"
    __table_args__ = {"postgresql_partition_by": "RANGE (run_id)"}  # noqa: RUF012 (SQLAlchemy's own form)

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    event: Mapped[str]
    data: Mapped[str]
    created_at: Mapped[Timestamp]
