"""Which runs there are: one by its id, those that a thread has to do, those that nobody does. Reads only."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal, owned
from app.errors import NotFound
from app.runs.models import Run

# Answers go first: they belong to the turn that is open. Then the order of submission.
DUE = "status = 'pending' AND (not_before IS NULL OR not_before <= now())"
ORDER = "(kind = 'resume') DESC, created_at, id"


async def find(tx: AsyncSession, principal: Principal, thread_id: UUID, run_id: UUID) -> Run:
    """One run of a thread of the principal's tenant, or NotFound."""
    run = await tx.scalar(owned(Run, principal).where(Run.id == run_id, Run.thread_id == thread_id))
    if run is None:
        raise NotFound.of("Run", run_id)
    return run


async def by_ids(tx: AsyncSession, run_ids: list[UUID]) -> list[Run]:
    """Runs as they are now, in the order of their submission."""
    query = select(Run).where(Run.id.in_(run_ids)).order_by(Run.id).execution_options(populate_existing=True)
    return list(await tx.scalars(query))


async def chosen(
    tx: AsyncSession, principal: Principal, *, thread_id: UUID | None, run_ids: list[UUID] | None, statuses: list[str]
) -> dict[UUID, list[UUID]]:
    """Runs of the tenant in these statuses, by thread; only those of a thread, or of a list, if these are given."""
    query = owned(Run, principal).with_only_columns(Run.thread_id, Run.id).where(Run.status.in_(statuses))
    if thread_id is not None:
        query = query.where(Run.thread_id == thread_id)
    if run_ids is not None:
        query = query.where(Run.id.in_(run_ids))
    found: dict[UUID, list[UUID]] = {}
    for row in await tx.execute(query.order_by(Run.thread_id, Run.id)):
        found.setdefault(row.thread_id, []).append(row.id)
    return found


async def active(tx: AsyncSession, thread_id: UUID, *, due: bool = False) -> list[tuple[UUID, str, str]]:
    """`(id, status, kind)` of the thread's runs that are not over, in the order in which they will run.

    `due`: without those whose time has not come.
    """
    rows = await tx.execute(
        text(f"""
            SELECT id, status, kind FROM runs WHERE thread_id = :thread_id AND status IN ('pending', 'running')
              AND (NOT :due OR status = 'running' OR not_before IS NULL OR not_before <= now())
            ORDER BY (status = 'running') DESC, {ORDER}
        """),
        {"thread_id": thread_id, "due": due},
    )
    return [(row.id, row.status, row.kind) for row in rows]


async def is_busy(tx: AsyncSession, thread_id: UUID) -> bool:
    """Whether the thread runs something now, or has something that is due and only waits for its turn."""
    found = await tx.scalar(
        text(f"""
            SELECT 1 FROM runs WHERE thread_id = :thread_id
              AND (status = 'running' OR ({DUE} AND waiting_for IS NULL)) LIMIT 1
        """),
        {"thread_id": thread_id},
    )
    return found is not None


async def owners(tx: AsyncSession) -> list[str]:
    """Every process that holds a run."""
    return list((await tx.execute(text("SELECT DISTINCT owner FROM runs WHERE status = 'running'"))).scalars())


async def stranded(tx: AsyncSession, *, older_than: float, limit: int) -> list[UUID]:
    """Threads with work that nobody does: an expired lease, or a run that has been due for `older_than` seconds."""
    rows = await tx.execute(
        text(f"""
            SELECT thread_id FROM runs WHERE status = 'running' AND lease_until < now()
            UNION
            SELECT thread_id FROM runs p WHERE {DUE} AND waiting_for IS NULL
              AND greatest(updated_at, not_before) < now() - make_interval(secs => :older_than)
              AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.thread_id = p.thread_id AND r.status = 'running')
            LIMIT :limit
        """),
        {"older_than": older_than, "limit": limit},
    )
    return list(rows.scalars())


async def has_due(tx: AsyncSession, thread_id: UUID, *, paused: bool) -> bool:
    """Whether the thread has a run that could start now."""
    kind = "AND kind = 'resume'" if paused else ""
    found = await tx.scalar(text(f"SELECT 1 FROM runs WHERE thread_id = :id AND {DUE} {kind} LIMIT 1"), {"id": thread_id})
    return found is not None
