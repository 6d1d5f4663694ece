"""What runs and threads need of the inbox, and what they tell it, without importing it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.runs.models import Run, RunStatus, StopReason
from app.runs.schemas import RunCreate
from app.threads.models import Thread


@dataclass(frozen=True, slots=True)
class PendingInterrupt:
    """A question found in the state when a run stopped."""

    interrupt_id: str
    value: Any
    task_id: str
    node: str
    namespace: tuple[str, ...] = ()
    response_schema: Any = None


@dataclass(frozen=True, slots=True)
class RunFinished:
    """How a run ended, told inside the finishing transaction."""

    run: Run
    thread: Thread
    status: RunStatus
    stop_reason: StopReason
    pending: list[PendingInterrupt] = field(default_factory=list)
    breakpoint_nodes: list[str] = field(default_factory=list)
    checkpoint_id: str | None = None
    values: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    changed: bool = True
    """False when the state was not read, so that nothing can be said of questions that were open before."""


class InboxPort(Protocol):
    """The gate between a thread and its open questions. The thread's row is locked by the caller in every method."""

    async def admit(self, tx: AsyncSession, thread: Thread, request: RunCreate, principal: Principal) -> UUID | None:
        """Decide whether a new run may be made on the thread.

        New input on a thread with open items is a Conflict `thread_waiting`. A resume is turned into inbox decisions, each
        of which makes (or joins) the thread's one waiting resume run through `RunService.resume`; its id is returned, and
        the caller makes no run of its own. None means: go on and make the run.
        """

    async def leave(self, tx: AsyncSession, thread: Thread, reason: str, principal: Principal) -> None:
        """Close the thread's open items before it is deleted, or its state is written, from outside."""

    async def answers(self, tx: AsyncSession, run: Run) -> dict[str, Any]:
        """All decided answers of the thread that no run has taken yet, by interrupt id. They are `resuming` from here on.

        Called when a resume run is claimed, and again when it is taken over: answers this run already took are repeated.
        """

    async def reconcile(self, tx: AsyncSession, outcome: RunFinished) -> None:
        """Open an item for each new question, and settle, fail, supersede or withdraw those that are no longer asked."""

    async def waiting(self, tx: AsyncSession, thread_id: UUID) -> bool:
        """Whether the thread has open items, so that queued input must wait for a human."""

    async def seen(self, tx: AsyncSession, thread_id: UUID, principal: Principal) -> None:
        """The principal has read the thread's open questions."""
