"""Runs: the table is the job. Statuses, allowed transitions and the reasons why a run stopped."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import DateTime, ForeignKey, Index, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import EMPTY_OBJECT, Base, Json, MaybeTimestamp, Owned, Timestamp, Uuid7


class RunStatus(StrEnum):
    """Status of a run on the wire. On the wire `interrupted` means cancelled; a run that asked is a `success`."""

    pending = "pending"
    running = "running"
    success = "success"
    error = "error"
    timeout = "timeout"
    interrupted = "interrupted"


TERMINAL = frozenset({RunStatus.success, RunStatus.error, RunStatus.timeout, RunStatus.interrupted})

TRANSITIONS: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.pending: frozenset({RunStatus.running, RunStatus.interrupted, RunStatus.error}),
    RunStatus.running: TERMINAL | {RunStatus.pending, RunStatus.running},  # released, or taken over
    **{status: frozenset() for status in TERMINAL},
}


class StopReason(StrEnum):
    """Why a run is not running any more. Tells apart what the wire calls by one name."""

    finished = "finished"
    human_input = "human_input"
    breakpoint = "breakpoint"
    failed = "failed"
    cancelled = "cancelled"
    rolled_back = "rolled_back"
    timeout = "timeout"
    drained = "drained"
    outage = "outage"
    lease_lost = "lease_lost"


class CancelAction(StrEnum):
    """What becomes of a cancelled run's work: it stays, or it is undone and the run forgotten."""

    interrupt = "interrupt"
    rollback = "rollback"


class RunKind(StrEnum):
    """What a run feeds to its graph: new input, or the answers of reviewers."""

    input = "input"
    resume = "resume"


class Run(Owned, Base):
    """One execution of an assistant on a thread. `epoch` rises with each claim; only its holder may write."""

    __tablename__ = "runs"
    __table_args__ = (
        # The guarantee that one thread never runs twice at the same time.
        Index("uq_runs_running_thread", "thread_id", unique=True, postgresql_where=text("status = 'running'")),
        Index("ix_runs_pending", "thread_id", "created_at", "id", postgresql_where=text("status = 'pending'")),
        Index("ix_runs_lease", "lease_until", postgresql_where=text("status = 'running'")),
        Index("ix_runs_thread", "thread_id", "created_at"),
    )

    id: Mapped[Uuid7]
    thread_id: Mapped[UUID] = mapped_column(ForeignKey("threads.id", ondelete="CASCADE"))
    assistant_id: Mapped[UUID]
    assistant_version: Mapped[int]
    graph_id: Mapped[str]
    subject: Mapped[str]
    status: Mapped[str] = mapped_column(default=RunStatus.pending)
    stop_reason: Mapped[str | None]
    kind: Mapped[str] = mapped_column(default=RunKind.input)
    kwargs: Mapped[Json] = mapped_column(server_default=EMPTY_OBJECT)
    metadata_: Mapped[Json] = mapped_column("metadata", server_default=EMPTY_OBJECT)
    multitask_strategy: Mapped[str] = mapped_column(default="enqueue")
    epoch: Mapped[int] = mapped_column(default=0)
    attempts: Mapped[int] = mapped_column(default=0)
    owner: Mapped[str | None]
    lease_until: Mapped[MaybeTimestamp]
    not_before: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    cancel: Mapped[str | None]
    waiting_for: Mapped[str | None]
    base_checkpoint_id: Mapped[str | None]
    error: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    created_at: Mapped[Timestamp]
    updated_at: Mapped[Timestamp]
    started_at: Mapped[MaybeTimestamp]
    finished_at: Mapped[MaybeTimestamp]

    @property
    def continues(self) -> bool:
        """Whether it goes on from the newest checkpoint as it is, so that its first writes join those that are there."""
        return self.kind == RunKind.resume or self.kwargs.get("input") is None


class RunBaseWrite(Base):
    """A write of LangGraph's that stood at the checkpoint that a run goes on from, before the run added its own.

    Kept while the run is not over, for its rollback: see `threads.checkpoints.undo_run`.
    """

    __tablename__ = "run_base_writes"

    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    checkpoint_ns: Mapped[str] = mapped_column(primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(primary_key=True)
    idx: Mapped[int] = mapped_column(primary_key=True)
    task_path: Mapped[str]
    channel: Mapped[str]
    type: Mapped[str | None]
    blob: Mapped[bytes]
