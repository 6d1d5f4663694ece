"""The inbox: implements the gate port of runs and threads, and what reviewers do. Knows no HTTP.

Statuses change only through `items.py`. Lock order everywhere: thread, run, item.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from app.auth import Principal, owned
from app.db.engine import Database
from app.graphs.registry import Graphs
from app.inbox import admission, decisions, items, permits, queries
from app.inbox.decisions import Decided, Terms
from app.inbox.items import By, item_json
from app.inbox.models import InboxItem, ItemStatus
from app.inbox.payloads import Answer, Kind, to_graph
from app.inbox.reconcile import Reconciler
from app.inbox.schemas import AuditRecord, Counts, ItemQuery
from app.runs.models import TERMINAL, Run
from app.runs.ports import BREAKPOINT, PendingInterrupt, ResumeRuns, RunFinished
from app.runs.schemas import RunCreate
from app.settings import Settings
from app.threads.models import Thread


class InboxService:
    """Implements `InboxPort`. `runs` is set by `resources.py`, which builds the circle."""

    runs: ResumeRuns

    def __init__(self, *, settings: Settings, database: Database, graphs: Graphs) -> None:
        self._settings = settings
        self._database = database
        self._reconciler = Reconciler(graphs)

    # -- for reviewers

    async def page(self, principal: Principal, query: ItemQuery) -> tuple[list[dict[str, Any]], str | None]:
        """A page of items, oldest first, and the cursor of the next one."""
        async with self._database.transaction() as tx:
            found, cursor = await queries.page(tx, principal, query)
            return [item_json(item) for item in found], cursor

    async def counts(self, principal: Principal) -> Counts:
        """How many questions wait."""
        async with self._database.transaction() as tx:
            return await queries.counts(tx, principal)

    async def get(self, principal: Principal, ref: str) -> dict[str, Any]:
        """One item, by its id or its interrupt's. Counts as delivered to the principal."""
        async with self._database.transaction() as tx:
            item = await queries.find(tx, principal, ref)
            await queries.mark_seen(tx, principal, item_id=item.id)
            return item_json(item)

    async def history(self, principal: Principal, ref: str) -> list[AuditRecord]:
        """The audit of one item."""
        async with self._database.transaction() as tx:
            return await queries.history(tx, principal, await queries.find(tx, principal, ref))

    async def decide(
        self,
        principal: Principal,
        ref: str,
        answer: Answer,
        terms: Terms,
        *,
        via: str = "inbox",
        dry_run: bool = False,
    ) -> Decided:
        """Answer a question: decision, audit, permit and the resuming run in one transaction. The first writer wins.

        Errors, each with the current `item`: 404 unknown; 409 `already_decided`, `args_changed`, `already_carried_out`,
        `unknown_outcome`, `ambiguous_id`, `revoked`; 410 `expired`, `superseded`, `withdrawn`; 412; 422.
        """
        async with self._database.transaction() as tx:
            found = await queries.find(tx, principal, ref, exact=True)
            thread = await self._lock_thread(tx, principal, found.thread_id)
            item = await self._lock_item(tx, found.id)
            key = decisions.key_of(principal, terms.key)
            terms = Terms(terms.versions, terms.args_hash, key, terms.allow_duplicate)
            if key is not None and decisions.repeated(item, key, decisions.fingerprint(answer, terms)):
                return Decided(item_json(item), item.resume_run_id, repeated=True)
            decisions.refuse_closed(item)
            decisions.refuse_unread(item, terms)
            checked = decisions.examine(item, answer)
            await decisions.refuse_second_effect(tx, item, checked, terms)
            if dry_run:
                return Decided(item_json(item), None, checked)
            assert thread is not None, "open items of a deleted thread were withdrawn with it"
            await decisions.store(tx, item, checked, By.human(principal, via), terms)
            run_id = await self._send(tx, thread, [item], principal)
            return Decided(item_json(item), run_id, checked)

    # -- the gate port

    async def admit(self, tx: AsyncSession, thread: Thread, request: RunCreate, principal: Principal) -> UUID | None:
        """See `InboxPort`. A resume becomes decisions, and the id of the run that carries them is returned."""
        strict = self._settings.bare_resume == "strict"
        decided = await admission.admit(tx, thread, request, principal, strict=strict)
        return await self._send(tx, thread, decided, principal, request) if decided else None

    async def answers(self, tx: AsyncSession, run: Run) -> dict[str, Any]:
        """See `InboxPort`. Static breakpoints appear as the one key `__breakpoint__`."""
        answers: dict[str, Any] = {}
        for item in await items.lock(tx, run.thread_id, (ItemStatus.decided, ItemStatus.resuming)):
            if item.status == ItemStatus.decided:
                outcome = {"state": "running", "error": None, "tool_message_id": None}
                by = By.engine(run.id, "taken")
                await items.move(tx, item, ItemStatus.resuming, by, resume_run_id=run.id, outcome=outcome)
            elif item.resume_run_id != run.id:
                continue  # delivered by an earlier run; waits for its siblings
            decision = item.decision or {}
            value = to_graph(item.kind, item.value, Answer(decision["type"], decision["args"]))
            answers[BREAKPOINT if item.kind == Kind.breakpoint else item.interrupt_id] = value
        return answers

    async def reconcile(self, tx: AsyncSession, outcome: RunFinished) -> None:
        """See `InboxPort`."""
        await self._reconciler.after_run(tx, outcome)

    async def revoke_unsent(self, tx: AsyncSession, thread: Thread) -> None:
        """See `InboxPort`. Answers whose run still waits are left alone."""
        for item in await items.lock(tx, thread.id, (ItemStatus.decided,)):
            carrier = await tx.get(Run, item.resume_run_id, populate_existing=True) if item.resume_run_id else None
            if carrier is None or carrier.status in TERMINAL:
                await decisions.revoke(tx, item, By.engine(item.resume_run_id, "run_cancelled"))

    async def waiting(self, tx: AsyncSession, thread_id: UUID) -> bool:
        """See `InboxPort`."""
        return await queries.open_exists(tx, thread_id)

    async def leave(self, tx: AsyncSession, thread: Thread, reason: str, principal: Principal) -> None:
        """See `ThreadInbox`. Where nothing is asked any more items are withdrawn, those of a written state are superseded."""
        to = ItemStatus.superseded if reason == "state_updated" else ItemStatus.withdrawn
        for item in await items.lock(tx, thread.id):
            await decisions.close(tx, item, to, By.human(principal, "thread", reason=reason))
        if reason == "thread_deleted":
            await permits.forget(tx, thread.id)
        else:
            await self.runs.wake(tx, thread)

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
        """See `ThreadInbox`."""
        await self._reconciler.after_write(tx, thread, pending, principal, copied_from=copied_from, run_id=run_id)

    async def seen(self, tx: AsyncSession, thread_id: UUID, principal: Principal) -> None:
        """See `ThreadInbox`."""
        await queries.mark_seen(tx, principal, thread_id=thread_id)

    # --

    async def _send(
        self,
        tx: AsyncSession,
        thread: Thread,
        decided: list[InboxItem],
        principal: Principal,
        request: RunCreate | None = None,
    ) -> UUID:
        """The run that carries the answers. It may be claimed, and take them, before this returns."""
        first = decided[0]
        run_id = await self.runs.resume(
            tx,
            thread,
            assistant_id=first.assistant_id,
            assistant_version=first.assistant_version,
            graph_id=first.graph_id,
            principal=principal,
            request=request,
        )
        await items.sent(tx, decided, run_id)
        return run_id

    async def _lock_thread(self, tx: AsyncSession, principal: Principal, thread_id: UUID) -> Thread | None:
        return await tx.scalar(
            owned(Thread, principal)
            .where(Thread.id == thread_id)
            .options(defer(Thread.values, raiseload=True))
            .with_for_update()
            .execution_options(populate_existing=True)
        )

    async def _lock_item(self, tx: AsyncSession, item_id: UUID) -> InboxItem:
        found = await tx.scalars(
            select(InboxItem).where(InboxItem.id == item_id).with_for_update().execution_options(populate_existing=True)
        )
        return found.one()
