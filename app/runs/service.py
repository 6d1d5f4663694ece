"""Runs as a client sees them: made, read, joined, cancelled. What can be refused is refused here, before a stream starts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import delete, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from app.assistants.service import AssistantService, Pinned
from app.auth import Principal, owned
from app.codec import dumps
from app.db.engine import Database, after_commit
from app.errors import Conflict, NotFound
from app.graphs.registry import Graphs
from app.runs import lookup, queue
from app.runs.cancel import Canceller
from app.runs.claims import Claims, Execution
from app.runs.endings import RunEndings
from app.runs.jobs import Jobs
from app.runs.models import TERMINAL, CancelAction, Run, RunKind, RunStatus, StopReason
from app.runs.ports import InboxPort
from app.runs.request import own_metadata, run_kwargs, traceparent
from app.runs.schemas import RunCreate
from app.runs.shortcut import Shortcut
from app.runs.worker import Worker
from app.settings import Settings
from app.streaming.channel import Frame
from app.streaming.log import EventLog
from app.threads.messages import named_messages
from app.threads.models import Thread, ThreadStatus
from app.threads.service import ThreadService

MAKES_WAY = {"interrupt": CancelAction.interrupt, "rollback": CancelAction.rollback}
"""What becomes of the thread's other runs when a new one does not wait for them."""
BUSY = text("""
UPDATE threads SET status = 'busy', updated_at = now(), error = NULL, metadata = metadata || CAST(:ran AS jsonb)
WHERE id = :id
""")
SUMMARY = ("metadata", "error", "end")


@dataclass(slots=True)
class RunService:
    """Implements `ResumeRuns` for the inbox. `inbox` and `worker` are set by `resources.py`, which builds the circle."""

    settings: Settings
    database: Database
    events: EventLog
    endings: RunEndings
    graphs: Graphs
    assistants: AssistantService
    threads: ThreadService
    claims: Claims
    jobs: Jobs
    inbox: InboxPort
    worker: Worker
    canceller: Canceller
    shortcut: Shortcut

    # -- making runs

    async def create(self, principal: Principal, thread_id: UUID, request: RunCreate, *, watched: bool = False) -> Run:
        """Make a run and start it here if there is a free slot; else it waits its turn on the thread or for a slot.

        `watched`: the caller follows it, so that a question it ends in is delivered to the principal.
        Errors: 404 unknown thread or assistant, 409 thread busy or waiting for a human, 422 wrong input or configuration.
        """
        if (started := await self._start(principal, thread_id, request, watched=watched)) is not None:
            return started
        async with self.database.transaction() as tx:
            pinned = await self.assistants.resolve(tx, principal, request.assistant_id)
            kwargs = self._kwargs(principal, pinned, request, watched=watched)
            thread = await self._thread(tx, principal, thread_id, request)
            await self.threads.refuse_overwriting(
                tx, thread_id, kwargs.get("input"), pinned=pinned, checkpoint=kwargs.get("checkpoint")
            )
            if thread.status != ThreadStatus.idle or request.resumes:
                answering = await self.inbox.admit(tx, thread, request, principal)
                if answering is not None:
                    run = await lookup.find(tx, principal, thread_id, answering)
                    if watched:
                        run.kwargs = {**run.kwargs, "watchers": [*run.kwargs.get("watchers", ()), principal.subject]}
                    return run
            busy = thread.status == ThreadStatus.busy and await lookup.is_busy(tx, thread_id)
            if busy and request.multitask_strategy == "reject":
                raise Conflict(
                    "Thread is already running a task. Wait for it to finish or choose a different multitask strategy.",
                    code="thread_busy",
                )
            if busy and (action := MAKES_WAY.get(request.multitask_strategy)) is not None:
                await self.canceller.make_way(tx, thread, action)
                await self.inbox.admit(tx, thread, request, principal)  # an answer that did not go out leaves its question
                busy = await lookup.is_busy(tx, thread_id)
            run = new_run(principal, thread_id, pinned, kwargs, request)
            return await self._submit(tx, thread, run, busy=busy, delay=request.after_seconds)

    async def _start(self, principal: Principal, thread_id: UUID, request: RunCreate, *, watched: bool) -> Run | None:
        """Make a run the short way. None where it must go the long way."""
        if not self.claims.free or request.input is None or request.command is not None or request.after_seconds:
            return None
        pinned = self.assistants.remembered(principal, request.assistant_id)
        if pinned is None:
            return None
        kwargs = self._kwargs(principal, pinned, request, watched=watched)
        if named_messages(kwargs.get("input")):
            return None
        run = new_run(principal, thread_id, pinned, kwargs, request)
        with self.claims.reserve():
            started = await self.shortcut.start(run, self.claims.claimant, _ran(run))
            if started is None:
                return None
            self.worker.start(Execution(started.run, row_version=started.row_version))
        return started.run

    def _kwargs(self, principal: Principal, pinned: Pinned, request: RunCreate, *, watched: bool) -> dict[str, Any]:
        kwargs = run_kwargs(self.settings, self.graphs, principal, pinned, request)
        return {**kwargs, "watchers": [principal.subject]} if watched else kwargs

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
        """Join the thread's one waiting resume run, or make it. See `ResumeRuns`.

        It goes on in the name of the run that asked: its context, its user, its stream modes.
        """
        active = await lookup.active(tx, thread.id)
        for run_id, status, kind in active:
            if status == RunStatus.pending and kind == RunKind.resume:
                return run_id
        asked = await tx.scalar(
            select(Run)
            .where(Run.thread_id == thread.id, Run.stop_reason.in_([StopReason.human_input, StopReason.breakpoint]))
            .order_by(Run.finished_at.desc())
            .limit(1)
        )
        inherited = dict(asked.kwargs) if asked is not None else {}
        for key in ("input", "command", "checkpoint", "after_seconds", "watchers", "traceparent"):
            inherited.pop(key, None)
        if (answering := traceparent.get()) is not None:
            inherited["traceparent"] = answering
        if request is not None:
            inherited |= {"stream_mode": list(request.stream_mode), "stream_subgraphs": request.stream_subgraphs}
            inherited |= {"webhook": request.webhook} if request.webhook else {}
        run = Run(
            id=uuid7(),
            tenant_id=thread.tenant_id,
            thread_id=thread.id,
            assistant_id=assistant_id,
            assistant_version=assistant_version,
            graph_id=graph_id,
            subject=asked.subject if asked is not None else principal.subject,
            kind=RunKind.resume,
            kwargs=inherited,
            metadata_=dict(asked.metadata_) if asked is not None else {},
            multitask_strategy="enqueue",
        )
        made = await self._submit(tx, thread, run, busy=any(status == RunStatus.running for _, status, _ in active))
        return made.id

    async def wake(self, tx: AsyncSession, thread: Thread) -> None:
        """See `ResumeRuns`."""
        if await queue.go_on(tx, thread.id):
            await self.jobs.defer(tx, thread.id)

    async def _submit(self, tx: AsyncSession, thread: Thread, run: Run, *, busy: bool, delay: float | None = None) -> Run:
        """Insert the run: claimed at once by this process if it may start now and there is a slot, else for delivery."""
        here = not busy and not delay and self.claims.free
        run = await queue.insert(tx, run, self.claims.claimant if here else None)
        if here:
            execution = await self.claims.taken(tx, run)
            after_commit(tx, lambda: self.worker.start(execution))
        elif not busy or delay:
            await self.jobs.defer(tx, thread.id, after_seconds=delay)
        await tx.execute(
            BUSY,
            {"id": thread.id, "ran": _ran(run).decode()},
        )
        return run

    async def _thread(self, tx: AsyncSession, principal: Principal, thread_id: UUID, request: RunCreate) -> Thread:
        try:
            return await self.threads.lock(tx, principal, thread_id)
        except NotFound:
            if request.if_not_exists != "create":
                raise
        await self.threads.create(tx, principal, thread_id=thread_id, if_exists="do_nothing")
        return await self.threads.lock(tx, principal, thread_id)

    # -- reading runs

    async def get(self, principal: Principal, thread_id: UUID, run_id: UUID) -> Run:
        """One run of a thread, or NotFound."""
        async with self.database.transaction() as tx:
            return await lookup.find(tx, principal, thread_id, run_id)

    async def of_thread(
        self, principal: Principal, thread_id: UUID, *, limit: int, offset: int, status: str | None
    ) -> list[Run]:
        """Runs of a thread, newest first."""
        async with self.database.transaction() as tx:
            await self.threads.get(tx, principal, thread_id)
            query = owned(Run, principal).where(Run.thread_id == thread_id)
            if status:
                query = query.where(Run.status == status)
            query = query.order_by(Run.created_at.desc(), Run.id.desc()).limit(limit).offset(offset)
            return list((await tx.execute(query)).scalars())

    # -- events

    def follow(self, run_id: UUID, *, modes: frozenset[str] | None = None) -> AsyncIterator[list[Frame]]:
        """All events of a run, from its first to its last."""
        return self.events.subscribe(run_id, after=None, modes=modes)

    async def join(
        self, run: Run, *, after: tuple[int, int] | None, modes: frozenset[str] | None
    ) -> AsyncIterator[list[Frame]]:
        """Events of a run for a client that comes later.

        With `after` everything behind that id. Without: what happens from now on, or of a finished run how it ended.
        """
        if run.status not in TERMINAL:
            return self.events.subscribe(run.id, after=after, live_only=after is None, modes=modes)
        if (reason := await self.events.lacking(run.id)) is not None:
            return _once(await self.endings.told(run.id, reason))
        if after is not None:
            return self.events.subscribe(run.id, after=after, modes=modes)
        frames = [f async for batch in self.events.subscribe(run.id, after=None) for f in batch]
        last = next((f for f in reversed(frames) if f.event == "values"), None)
        return _once([f for f in frames if f.event in SUMMARY or f is last])

    # -- deleting runs

    async def delete(self, principal: Principal, thread_id: UUID, run_id: UUID) -> None:
        """Delete a run that is over. Errors: 404 unknown run, 409 `run_active` if it is not over."""
        async with self.database.transaction() as tx:
            await self.threads.lock(tx, principal, thread_id)
            run = await lookup.find(tx, principal, thread_id, run_id)
            if run.status not in TERMINAL:
                raise Conflict("The run is not over. Cancel it first.", code="run_active")
            await tx.execute(delete(Run).where(Run.id == run_id))


def new_run(principal: Principal, thread_id: UUID, pinned: Pinned, kwargs: dict[str, Any], request: RunCreate) -> Run:
    """A run of the principal's, not stored yet."""
    return Run(
        id=uuid7(),
        tenant_id=principal.tenant,
        thread_id=thread_id,
        assistant_id=pinned.assistant_id,
        assistant_version=pinned.version,
        graph_id=pinned.graph_id,
        subject=principal.subject,
        kind=RunKind.input,
        kwargs=kwargs,
        metadata_={**pinned.metadata, **own_metadata(request.metadata)},
        multitask_strategy=request.multitask_strategy,
    )


def _ran(run: Run) -> bytes:
    """What a thread's metadata tells of its last run."""
    return dumps({"graph_id": run.graph_id, "assistant_id": run.assistant_id})


async def _once(frames: list[Frame]) -> AsyncIterator[list[Frame]]:
    yield frames
