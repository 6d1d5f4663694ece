"""Threads: the rows, their locks, copies and deletion. Reading and writing state is in `states.py`.

Every method works in the caller's transaction. Knows no HTTP, and of the inbox only the port.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, bindparam, column, delete, exists, func, literal, select, table, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer, load_only
from uuid_utils.compat import uuid7

from app.assistants.service import AssistantService, Pinned
from app.auth import Principal, owned
from app.codec import dumps
from app.db.engine import Database
from app.errors import AppError, BadRequest, Conflict, NotFound
from app.graphs.registry import Graphs
from app.threads.checkpoints import Graph, copy_checkpoints, delete_checkpoints, in_transaction
from app.threads.messages import named_messages
from app.threads.models import Thread, ThreadStatus
from app.threads.overwriting import messages_in, refuse_others, stored_messages
from app.threads.ports import ThreadInbox
from app.threads.schemas import ATTRIBUTES, ThreadFilter, ThreadSearch
from app.threads.state import sync_from_snapshot

# Threads know no runs. These are the few columns that deletion reads.
RUNS = table("runs", column("id"), column("thread_id"), column("status"))
EVENTS = table("run_events", column("run_id"))

LOCK = (
    select(Thread)
    .where(Thread.tenant_id == bindparam("tenant"), Thread.id == bindparam("id"))
    .options(defer(Thread.values, raiseload=True))
    .with_for_update()
    .execution_options(populate_existing=True)
)
"""Before every run: built once."""
CREATE = """
INSERT INTO threads (id, tenant_id, status, metadata) VALUES (%s, %s, 'idle', %s::jsonb) RETURNING created_at
"""


class ThreadService:
    """Reads and writes threads. `lock` comes before everything that changes what a thread is doing."""

    def __init__(self, database: Database, graphs: Graphs, assistants: AssistantService, inbox: ThreadInbox) -> None:
        self.database = database
        self.graphs = graphs
        self.assistants = assistants
        self.inbox = inbox

    # Reading ------------------------------------------------------------------------------------------------------

    async def get(self, tx: AsyncSession, principal: Principal, thread_id: UUID) -> Thread:
        """A thread of the principal's tenant, or NotFound."""
        thread = await tx.scalar(owned(Thread, principal).where(Thread.id == thread_id))
        if thread is None:
            raise _missing(thread_id)
        return thread

    async def show(self, tx: AsyncSession, principal: Principal, thread_id: UUID) -> Thread:
        """Like `get`, for somebody to read: questions that wait in the thread have been seen."""
        thread = await self.get(tx, principal, thread_id)
        if thread.status == ThreadStatus.interrupted:
            await self.inbox.seen(tx, thread_id, principal)
        return thread

    async def find(self, tx: AsyncSession, principal: Principal, thread_id: UUID) -> Thread:
        """Like `get`, without loading `values`."""
        thread = await tx.scalar(
            owned(Thread, principal).where(Thread.id == thread_id).options(defer(Thread.values, raiseload=True))
        )
        if thread is None:
            raise _missing(thread_id)
        return thread

    async def lock(self, tx: AsyncSession, principal: Principal, thread_id: UUID) -> Thread:
        """The thread, locked until the transaction ends; NotFound if it is somebody else's. Its `values` are not loaded."""
        thread = await tx.scalar(LOCK, {"tenant": principal.tenant, "id": thread_id})
        if thread is None:
            raise _missing(thread_id)
        return thread

    async def search(self, tx: AsyncSession, principal: Principal, query: ThreadSearch) -> tuple[list[Thread], int]:
        """A page of threads, last changed first by default, and how many there are in all."""
        total = await tx.scalar(self._matching(select(func.count()).select_from(Thread), principal, query, query.ids)) or 0
        by = {
            "thread_id": Thread.id,
            "status": Thread.status,
            "created_at": Thread.created_at,
            "updated_at": Thread.updated_at,
            "state_updated_at": Thread.state_updated_at,
        }[query.sort_by or "updated_at"]
        order = (by.asc(), Thread.id.asc()) if query.sort_order == "asc" else (by.desc(), Thread.id.desc())
        page = self._matching(select(Thread), principal, query, query.ids).order_by(*order)
        page = page.limit(query.limit).offset(query.offset)
        if query.select is not None:
            wanted = {ATTRIBUTES.get(field, field) for field in query.select} | {"id", "status"}
            page = page.options(load_only(*(getattr(Thread, name) for name in wanted)))
        threads = list((await tx.scalars(page)).all())
        if query.select is None or "interrupts" in query.select:
            for thread in threads:
                if thread.status == ThreadStatus.interrupted:
                    await self.inbox.seen(tx, thread.id, principal)
        return threads, total

    async def count(self, tx: AsyncSession, principal: Principal, query: ThreadFilter) -> int:
        """How many threads match."""
        return await tx.scalar(self._matching(select(func.count()).select_from(Thread), principal, query, None)) or 0

    # Writing ------------------------------------------------------------------------------------------------------

    async def create_new(self, principal: Principal, metadata: dict[str, Any]) -> Thread:
        """Create an empty thread under a new id, in one statement that is its own transaction."""
        thread = Thread(
            id=uuid7(), tenant_id=principal.tenant, status=ThreadStatus.idle, metadata_=metadata, config={}, values=None
        )
        async with self.database.pool.connection() as connection:
            params = [thread.id, thread.tenant_id, dumps(metadata).decode()]
            row = await (await connection.execute(CREATE, params)).fetchone()
        assert row is not None
        thread.created_at = thread.updated_at = thread.state_updated_at = row["created_at"]
        thread.interrupts = thread.error = None
        return thread

    async def create(
        self,
        tx: AsyncSession,
        principal: Principal,
        *,
        thread_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        if_exists: str = "raise",
    ) -> Thread:
        """Create a thread. With `if_exists="do_nothing"` an existing one of the same tenant is returned as it is."""
        thread_id = thread_id or uuid7()
        thread: Thread | None = await tx.scalar(
            pg_insert(Thread)
            .values(id=thread_id, tenant_id=principal.tenant, status=ThreadStatus.idle, metadata_=metadata or {})
            .on_conflict_do_nothing(index_elements=[Thread.id])
            .returning(Thread)
        )
        if thread is None and if_exists == "do_nothing":
            thread = await tx.scalar(owned(Thread, principal).where(Thread.id == thread_id))
        if thread is None:
            raise Conflict(f"Thread with ID {thread_id} already exists.", code="thread_exists")
        return thread

    async def patch(self, tx: AsyncSession, principal: Principal, thread_id: UUID, metadata: dict[str, Any] | None) -> Thread:
        """Merge metadata into a thread's."""
        thread: Thread | None = await tx.scalar(
            update(Thread)
            .where(Thread.id == thread_id, Thread.tenant_id == principal.tenant)
            .values(metadata_=Thread.metadata_.concat(literal(metadata or {}, JSONB)), updated_at=func.now())
            .returning(Thread)
        )
        if thread is None:
            raise _missing(thread_id)
        return thread

    async def delete(self, tx: AsyncSession, principal: Principal, thread_id: UUID) -> None:
        """Delete a thread with its state, its runs and what they sent. Open questions are withdrawn.

        Errors: 404, 409 `thread_busy` while a run is running. Runs that only wait are cancelled by this.
        """
        thread = await self.lock(tx, principal, thread_id)
        running = exists().where(RUNS.c.thread_id == thread_id, RUNS.c.status == "running")
        if await tx.scalar(select(running)):
            raise Conflict("The thread is running. Cancel its run, or wait for it, then delete the thread.", code="thread_busy")
        await self.inbox.leave(tx, thread, "thread_deleted", principal)
        await tx.execute(delete(EVENTS).where(EVENTS.c.run_id.in_(select(RUNS.c.id).where(RUNS.c.thread_id == thread_id))))
        await delete_checkpoints(tx, thread_id)
        await tx.flush()
        await tx.execute(delete(Thread).where(Thread.id == thread_id))

    async def copy(self, tx: AsyncSession, principal: Principal, thread_id: UUID) -> Thread:
        """A new thread with the same state and metadata. It may do nothing that the source was allowed to do:

        questions that wait in the state become new items, and calls that a human released must be released again.
        """
        source = await self.lock(tx, principal, thread_id)
        target = await self.create(tx, principal, metadata=source.metadata_)
        target.config = source.config
        target.graph_id, target.assistant_id, target.assistant_version = (
            source.graph_id,
            source.assistant_id,
            source.assistant_version,
        )
        await copy_checkpoints(tx, source.id, target.id)
        pinned = await self.pinned(tx, principal, target)
        if pinned is not None:
            await self.settle(tx, principal, target, self.graph(pinned), copied_from=source.id)
        await tx.flush()
        return target

    # State, for this slice and for runs ---------------------------------------------------------------------------

    async def pinned(self, tx: AsyncSession, principal: Principal, thread: Thread) -> Pinned | None:
        """The assistant version that the thread's state belongs to; None if the thread never ran and names none."""
        if thread.assistant_id is not None and thread.assistant_version is not None:
            return await self.assistants.revision(thread.assistant_id, thread.assistant_version, tx)
        for key in ("assistant_id", "graph_id"):
            named = thread.metadata_.get(key)
            if isinstance(named, str):
                try:
                    return await self.assistants.resolve(tx, principal, named)
                except AppError:
                    continue
        return None

    def graph(self, pinned: Pinned) -> Graph:
        """The compiled graph of an assistant version; Conflict if this server does not serve it any more."""
        if pinned.graph_id not in self.graphs.graph_ids:
            raise Conflict(
                f"The thread's graph '{pinned.graph_id}' is not served any more. Add it to langgraph.json again.",
                code="graph_not_served",
            )
        return self.graphs.graph(pinned.graph_id, pinned.key, pinned.config)

    async def settle(
        self, tx: AsyncSession, principal: Principal, thread: Thread, graph: Graph, *, copied_from: UUID | None = None
    ) -> None:
        """After a write to the state of a (locked) thread: bring its row up to date, and its questions into the inbox."""
        reader = await in_transaction(tx, graph)
        snapshot = await reader.aget_state({"configurable": {"thread_id": str(thread.id)}})
        pending = sync_from_snapshot(thread, snapshot, self.graphs.private_keys)
        if pending:
            run_id = (snapshot.metadata or {}).get("run_id")
            await tx.flush()
            await self.inbox.asked(
                tx,
                thread,
                pending,
                principal,
                copied_from=copied_from,
                run_id=UUID(run_id) if isinstance(run_id, str) else None,
            )

    async def refuse_overwriting(
        self,
        tx: AsyncSession,
        thread_id: UUID,
        accepted: Any,
        *,
        path: str = "input",
        pinned: Pinned | None = None,
        checkpoint: dict[str, Any] | None = None,
    ) -> None:
        """Refuse an accepted input that would overwrite a message by bringing its id. Repeats are let through.

        With `checkpoint` the messages are those of that checkpoint, read as `pinned`: a branch may bring an id that only
        other branches have.
        """
        brought = named_messages(accepted)
        if not brought:
            return
        named = {k: v for k, v in (checkpoint or {}).items() if k in ("checkpoint_id", "checkpoint_ns") and v}
        if named and pinned is not None:
            reader = await in_transaction(tx, self.graph(pinned))
            there = messages_in(await reader.aget_state({"configurable": {"thread_id": str(thread_id), **named}}))
        else:
            there = await stored_messages(tx, thread_id, brought)
        refuse_others(brought, there, path)

    # ---------------------------------------------------------------------------------------------------------------

    def _matching(
        self, statement: Select[Any], principal: Principal, query: ThreadFilter, ids: list[UUID] | None
    ) -> Select[Any]:
        conditions: list[ColumnElement[bool]] = [Thread.tenant_id == principal.tenant]
        if ids is not None:
            conditions.append(Thread.id.in_(ids))
        if query.metadata:
            conditions.append(Thread.metadata_.contains(query.metadata))
        if query.values:
            conditions.append(Thread.values.contains(query.values))
        if query.status is not None:
            conditions.append(Thread.status == query.status)
        return statement.where(*conditions)


def _missing(thread_id: UUID) -> NotFound:
    return NotFound(f"Thread with ID {thread_id} not found.", code="thread_not_found")


def without_graph(thread_id: UUID) -> BadRequest:
    """The error for a thread whose state no graph is known for."""
    return BadRequest(
        f"Thread {thread_id} has no graph yet: run an assistant on it first, or set `graph_id` in its metadata.",
        code="thread_without_graph",
    )
