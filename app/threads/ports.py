"""What threads tell the inbox, without importing it. `resources.py` hands the implementation over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.threads.models import Thread


@dataclass(frozen=True, slots=True)
class PendingInterrupt:
    """A question found in the state of a thread."""

    interrupt_id: str
    value: Any
    task_id: str
    node: str
    namespace: tuple[str, ...] = ()
    response_schema: Any = None


class ThreadInbox(Protocol):
    """The open questions of a thread. The thread's row is locked by the caller, except for `seen`."""

    async def leave(self, tx: AsyncSession, thread: Thread, reason: str, principal: Principal) -> None:
        """Close the thread's open items, because of

        `state_updated`, a write from outside: superseded; `turn_ended`, a write that ends the turn: withdrawn;
        `thread_deleted`: withdrawn, and the thread's permits are forgotten, since a thread of the same id may be made again.
        """

    async def asked(
        self,
        tx: AsyncSession,
        thread: Thread,
        pending: list[PendingInterrupt],
        principal: Principal,
        *,
        copied_from: UUID | None = None,
        run_id: UUID | None = None,
    ) -> None:
        """Open an item for each question that the thread asks now, though no run of its own has just ended.

        That is so after a copy (`copied_from` names the source thread) and after a state update that restores a question.
        `run_id` is the run that left the question in the state, as its checkpoint tells.
        """

    async def seen(self, tx: AsyncSession, thread_id: UUID, principal: Principal) -> None:
        """The principal has read the thread's open questions. Writes only what is new."""
