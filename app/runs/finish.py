"""Ends one run: its row, its thread, its questions, its last events and what the thread runs next, all in one transaction.

Under the run's epoch: what is not this process' any more is discarded whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.assistants.service import AssistantService
from app.db.engine import Database, after_commit
from app.errors import AppError
from app.graphs.registry import Graphs
from app.runs import lookup, queue
from app.runs.claims import Claims, Execution
from app.runs.failures import is_outage
from app.runs.invocation import Graph, newest
from app.runs.jobs import Jobs
from app.runs.models import Run, RunKind, StopReason
from app.runs.outcome import Outcome, settle_thread
from app.runs.ports import InboxPort, RunFinished, RunObserver
from app.runs.shortcut import Shortcut, usual
from app.streaming.writer import RunWriter
from app.threads.checkpoints import in_transaction, undo_run

log = structlog.get_logger(__name__)


class Finisher:
    """Ends runs. One per process."""

    def __init__(
        self,
        *,
        database: Database,
        graphs: Graphs,
        assistants: AssistantService,
        inbox: InboxPort,
        claims: Claims,
        jobs: Jobs,
        shortcut: Shortcut,
        observers: Sequence[RunObserver] = (),
    ) -> None:
        self._database = database
        self._graphs = graphs
        self._assistants = assistants
        self._inbox = inbox
        self._claims = claims
        self._jobs = jobs
        self._shortcut = shortcut
        self._observers = observers

    async def finish(self, execution: Execution, writer: RunWriter, outcome: Outcome, *, read: bool = True) -> Execution | None:
        """End a run. Returns what its thread runs next, if this process claimed it. `read`: whether to look at its state."""
        run = execution.run
        await writer.settle()
        if await self._shortly(execution, writer, outcome):
            return None
        if outcome.needs_state and read:
            outcome = await self._with_state(run, outcome)
        async with self._database.transaction() as tx:
            thread = await queue.lock_thread(tx, run.thread_id)
            ended = thread is not None and await queue.finish(tx, run, outcome.status, outcome.reason, outcome.error)
            if not ended and thread is not None and await queue.wants_rollback(tx, run):
                outcome = await self._undone(tx, run)
                ended = await queue.finish(tx, run, outcome.status, outcome.reason, rolled_back=True)
            if not ended or thread is None:
                writer.abandon()
                log.warning("run_not_ours", run_id=str(run.id), epoch=run.epoch)
                return None
            finished = RunFinished(
                run=run,
                thread=thread,
                status=outcome.status,
                stop_reason=outcome.reason,
                pending=outcome.pending,
                breakpoint_nodes=outcome.breakpoint_nodes,
                checkpoint_id=outcome.checkpoint_id,
                values=outcome.values,
                error=outcome.error,
                changed=not outcome.needs_state,
            )
            if outcome.pending or outcome.breakpoint_nodes or thread.interrupts or run.kind == RunKind.resume:
                await self._inbox.reconcile(tx, finished)
            for observer in self._observers:
                await observer.run_finished(tx, finished)
            paused = bool(outcome.pending or outcome.breakpoint_nodes)
            following = await self._claims.claim(tx, thread, paused=paused)
            handed_on = following is None and await self._hand_on(tx, run.thread_id, paused=paused)
            await settle_thread(
                tx, thread, run, outcome, private=self._graphs.private_keys, busy=following is not None or handed_on
            )
            after_commit(tx, await writer.finish(tx, outcome.last_events(run)))
            if outcome.reason is StopReason.rolled_back:
                await queue.forget(tx, [run.id])
        execution.outcome = outcome
        log.info("run_ended", run_id=str(run.id), thread_id=str(run.thread_id), status=outcome.status, reason=outcome.reason)
        return following

    async def _shortly(self, execution: Execution, writer: RunWriter, outcome: Outcome) -> bool:
        """End the run in one statement. False where it takes more."""
        run = execution.run
        if execution.row_version is None or not usual(run, outcome):
            return False
        frames, committed = writer.last(outcome.last_events(run))
        private = self._graphs.private_keys
        if not await self._shortcut.end(run, execution.row_version, outcome, frames, private=private):
            return False
        committed()
        execution.outcome = outcome
        log.info("run_ended", run_id=str(run.id), thread_id=str(run.thread_id), status=outcome.status, reason=outcome.reason)
        return True

    async def _hand_on(self, tx: AsyncSession, thread_id: UUID, *, paused: bool) -> bool:
        """Tell other processes of what the thread runs next, when this one takes nothing more. Returns whether there is."""
        if paused:
            await queue.wait_for_human(tx, thread_id)
        if self._claims.open or not await lookup.has_due(tx, thread_id, paused=paused):
            return False
        await self._jobs.defer(tx, thread_id)
        return True

    async def _undone(self, tx: AsyncSession, run: Run) -> Outcome:
        """Undo what a run did to its thread, and say how the thread stands now."""
        await undo_run(tx, run.thread_id, run.id, run.base_checkpoint_id if run.continues else None)
        outcome = Outcome.stopped(StopReason.rolled_back)
        try:
            graph = await in_transaction(tx, await self._graph(run, tx))
        except AppError as error:  # it is not served any more
            log.warning("state_unreadable", run_id=str(run.id), error=repr(error))
            return outcome
        return outcome.with_state(await graph.aget_state(newest(run)))

    async def _graph(self, run: Run, tx: AsyncSession | None = None) -> Graph:
        revision = await self._assistants.revision(run.assistant_id, run.assistant_version, tx)
        return self._graphs.graph(run.graph_id, (run.assistant_id, run.assistant_version), revision.config)

    async def _with_state(self, run: Run, outcome: Outcome) -> Outcome:
        """A run that was cut short or failed: read what it left behind, if that is possible at all."""
        try:
            return outcome.with_state(await (await self._graph(run)).aget_state(newest(run)))
        except Exception as error:
            if is_outage(error):
                raise
            log.warning("state_unreadable", run_id=str(run.id), error=repr(error))
            return outcome
