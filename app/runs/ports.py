"""What runs and threads need of the inbox, and what they tell it, without importing it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.runs.models import Run, RunStatus, StopReason
from app.runs.schemas import RunCreate
from app.threads.models import Thread
from app.threads.ports import PendingInterrupt as PendingInterrupt
from app.threads.ports import ThreadInbox

if TYPE_CHECKING:
    from app.runs.claims import Execution

BREAKPOINT = "__breakpoint__"
"""Key in the answers of a resume run: a static breakpoint was released, so the graph goes on without input."""


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


class RunObserver(Protocol):
    """Is told when a run ends: of each that names a webhook, and of others unless they end by `shortcut.py`."""

    async def run_finished(self, tx: AsyncSession, finished: RunFinished) -> None:
        """A run ends with this transaction, and its row says so already. The thread's row is locked."""


class RunTelemetry:
    """Is told of each run that this process executes. This one does nothing."""

    def running(self, execution: Execution) -> AbstractContextManager[None]:
        """Around the execution of a claimed run. Afterwards `outcome` says how it ended here, if it did."""
        return nullcontext()


class Outbox(Protocol):
    """Sends messages to addresses of clients."""

    async def add(self, tx: AsyncSession, *, tenant_id: str, run_id: UUID, url: str, event: str, payload: bytes) -> None:
        """Send a JSON object once the transaction has committed, until it was received, whatever happens meanwhile."""


class ResumeRuns(Protocol):
    """Makes the run that carries answers to the graph."""

    async def resume(
        self,
        tx: AsyncSession,
        thread: Thread,
        *,
        assistant_id: UUID,
        assistant_version: int,
        graph_id: str,
        principal: Principal,
        request: RunCreate | None = None,
    ) -> UUID:
        """Join the thread's one waiting resume run, or make it, and start it after the commit. Returns its id.

        The thread's row is locked and is marked busy. `request` brings the stream modes of the client that answers.
        """

    async def wake(self, tx: AsyncSession, thread: Thread) -> None:
        """The thread's questions were closed from outside: input that waited behind them may run."""


class InboxPort(ThreadInbox, Protocol):
    """The gate between a thread and its open questions. The thread's row is locked by the caller in every method."""

    async def admit(self, tx: AsyncSession, thread: Thread, request: RunCreate, principal: Principal) -> UUID | None:
        """Decide whether a new run may be made on the thread.

        New input on a thread with open items is a Conflict `thread_waiting`. A resume is turned into inbox decisions, each
        of which makes (or joins) the thread's one waiting resume run through `RunService.resume`; its id is returned, and
        the caller makes no run of its own. None means: go on and make the run.
        """

    async def answers(self, tx: AsyncSession, run: Run) -> dict[str, Any]:
        """All decided answers of the thread that no run has taken yet, by interrupt id. They are `resuming` from here on.

        Called when a resume run is claimed, and again when it is taken over: answers this run already took are repeated.
        """

    async def reconcile(self, tx: AsyncSession, outcome: RunFinished) -> None:
        """Open an item for each new question, and settle, fail, supersede or withdraw those that are no longer asked."""

    async def revoke_unsent(self, tx: AsyncSession, thread: Thread) -> None:
        """A waiting resume run was cancelled: questions whose answers it would have carried are open again."""

    async def waiting(self, tx: AsyncSession, thread_id: UUID) -> bool:
        """Whether the thread has open items, so that queued input must wait for a human."""
