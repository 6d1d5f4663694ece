"""Ends runs before their time: one, many, and those that a newer run takes the place of.

A run that never began is ended here. One that did is told: its process stops it at the next await and ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.db.engine import Database, hint
from app.errors import Conflict, NotFound
from app.runs import lookup, queue
from app.runs.jobs import Jobs
from app.runs.models import CancelAction, RunStatus, StopReason
from app.runs.ports import InboxPort, RunFinished, RunObserver
from app.runs.worker import CANCEL_CHANNEL
from app.streaming.log import EventLog
from app.threads.models import Thread, ThreadStatus
from app.threads.service import ThreadService


@dataclass(slots=True)
class Canceller:
    """Cancels runs."""

    database: Database
    events: EventLog
    threads: ThreadService
    inbox: InboxPort
    jobs: Jobs
    observers: Sequence[RunObserver] = ()

    async def cancel(
        self, principal: Principal, thread_id: UUID, run_id: UUID, action: CancelAction = CancelAction.interrupt
    ) -> None:
        """Cancel a run that is not over. Open questions of its thread stay open.

        `interrupt` keeps what the run had done. `rollback` undoes it, state and answers, and deletes the run; what a tool
        did in the world stays done. Errors: 404 unknown run, 409 `run_over` if it has ended already.
        """
        async with self.database.transaction() as tx:
            thread = await self.threads.lock(tx, principal, thread_id)
            run = await lookup.find(tx, principal, thread_id, run_id)
            if not await self._end(tx, thread, [run_id], action):
                raise Conflict(f"The run has ended already: {run.status}.", code="run_over")
            await self._settle(tx, thread)

    async def cancel_if_active(self, principal: Principal, thread_id: UUID, run_id: UUID) -> None:
        """Cancel a run whose client has gone, if there still is something to cancel."""
        with suppress(NotFound, Conflict):
            await self.cancel(principal, thread_id, run_id)

    async def cancel_many(
        self,
        principal: Principal,
        *,
        thread_id: UUID | None,
        run_ids: list[UUID] | None,
        statuses: list[str],
        action: CancelAction,
    ) -> None:
        """Cancel all runs of the tenant that match and are not over. NotFound when there are none."""
        async with self.database.transaction() as tx:
            found = await lookup.chosen(tx, principal, thread_id=thread_id, run_ids=run_ids, statuses=statuses)
        cancelled = False
        for thread, runs in found.items():  # one transaction a thread: no lock is held while another is awaited
            with suppress(NotFound):  # deleted meanwhile
                async with self.database.transaction() as tx:
                    locked = await self.threads.lock(tx, principal, thread)
                    if await self._end(tx, locked, runs, action):
                        await self._settle(tx, locked)
                        cancelled = True
        if not cancelled:
            raise NotFound("No runs found to cancel.", code="no_runs_to_cancel")

    async def make_way(self, tx: AsyncSession, thread: Thread, action: CancelAction) -> None:
        """End what the (locked) thread runs and what waits there for its turn, so that a new run is next."""
        active = await lookup.active(tx, thread.id, due=True)
        await self._end(tx, thread, [run_id for run_id, _, _ in active], action)

    async def _end(self, tx: AsyncSession, thread: Thread, run_ids: list[UUID], action: CancelAction) -> bool:
        ended, told, waits = await queue.cancel(tx, thread, run_ids, action)
        for run_id in ended:
            await self.events.close(tx, run_id)
        if ended:
            await self._tell(tx, thread, ended, action)
            if action is CancelAction.rollback:
                await queue.forget(tx, ended)
            await self.inbox.revoke_unsent(tx, thread)  # answers that they would have carried
        if waits:
            await self.jobs.defer(tx, thread.id)
        for run_id in told:
            hint(tx, CANCEL_CHANNEL, str(run_id))
        return bool(ended or told)

    async def _tell(self, tx: AsyncSession, thread: Thread, ended: list[UUID], action: CancelAction) -> None:
        reason = StopReason.rolled_back if action is CancelAction.rollback else StopReason.cancelled
        for run in await lookup.by_ids(tx, ended):
            for observer in self.observers:
                await observer.run_finished(tx, RunFinished(run, thread, RunStatus.interrupted, reason, changed=False))

    async def _settle(self, tx: AsyncSession, thread: Thread) -> None:
        """The thread may have nothing to do any more."""
        if not await lookup.is_busy(tx, thread.id):
            waiting = await self.inbox.waiting(tx, thread.id)
            thread.status = ThreadStatus.interrupted if waiting else ThreadStatus.idle
