"""The SQL of the job: insert, claim, renew, finish, release. Only this file and `shortcut.py` write `runs.status`.

Every function works inside the caller's transaction, and submit, claim and finish each hold the thread's row lock first:
without it a run could become pending just after the finisher looked for pending ones, and be lost. Only the database's
clock counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from sqlalchemy import Executable, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from app.runs.lookup import DUE, ORDER
from app.runs.models import TRANSITIONS, CancelAction, Run, RunStatus, StopReason
from app.threads.models import Thread

HEAD_CHECKPOINT = """(
    SELECT c.checkpoint_id FROM checkpoints c
    WHERE c.thread_id = CAST(:thread_id AS text) AND c.checkpoint_ns = '' ORDER BY c.checkpoint_id DESC LIMIT 1
)"""

CLAIMED = f"""
    status = 'running', owner = :owner, epoch = epoch + 1, attempts = attempts + 1, waiting_for = NULL,
    lease_until = now() + make_interval(secs => :lease), started_at = coalesce(started_at, now()), updated_at = now(),
    base_checkpoint_id = CASE WHEN epoch = 0 THEN {HEAD_CHECKPOINT} ELSE base_checkpoint_id END
"""

INSERT = select(Run).from_statement(
    text(f"""
INSERT INTO runs (id, tenant_id, thread_id, assistant_id, assistant_version, graph_id, subject, kind, kwargs, metadata,
    multitask_strategy, status, epoch, attempts, owner, lease_until, started_at, base_checkpoint_id, not_before)
SELECT :id, :tenant_id, :thread_id, :assistant_id, :assistant_version, :graph_id, :subject, :kind,
    CAST(:kwargs AS jsonb), CAST(:metadata AS jsonb), :strategy,
    CASE WHEN c THEN 'running' ELSE 'pending' END, c::int, c::int, :owner,
    CASE WHEN c THEN now() + make_interval(secs => :lease) END, CASE WHEN c THEN now() END,
    CASE WHEN c THEN {HEAD_CHECKPOINT} END, now() + make_interval(secs => CAST(:delay AS float8))
FROM (SELECT CAST(:claimed AS boolean) AS c) AS claim
RETURNING *
""")
)


def _claim(kind: str) -> Executable:
    return select(Run).from_statement(
        text(f"""
UPDATE runs SET {CLAIMED} WHERE id = (
    SELECT id FROM runs WHERE thread_id = :thread_id AND status = 'running' AND lease_until < now()
    UNION ALL
    (SELECT id FROM runs WHERE thread_id = :thread_id AND {DUE} {kind}
       AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.thread_id = :thread_id AND r.status = 'running')
     ORDER BY {ORDER} LIMIT 1)
    LIMIT 1
) RETURNING *
        """)
    )


LOCK = (
    select(Thread)
    .where(Thread.id == bindparam("thread_id"))
    .options(defer(Thread.values, raiseload=True))  # it may be large, and nobody here needs it
    .with_for_update()
    .execution_options(populate_existing=True)
)
FINISH = text("""
WITH ended AS (
    UPDATE runs SET status = :status, stop_reason = :reason, error = CAST(:error AS jsonb), owner = NULL,
        lease_until = NULL, cancel = NULL, finished_at = now(), updated_at = now()
    WHERE id = :id AND epoch = :epoch AND status = 'running' AND (cancel IS DISTINCT FROM 'rollback' OR :rolled_back)
    RETURNING id
), forgotten AS (
    DELETE FROM run_base_writes USING ended WHERE run_id = ended.id
)
SELECT id FROM ended
""")
RELEASE = text("""
UPDATE runs SET status = 'pending', stop_reason = :reason, owner = NULL, lease_until = NULL,
    attempts = attempts - :uncounted, updated_at = now()
WHERE id = :id AND epoch = :epoch AND status = 'running'
""")
CLAIM = _claim("")
CLAIM_ANSWERS = _claim("AND kind = 'resume'")


@dataclass(frozen=True, slots=True)
class Claimant:
    """The process that claims, and for how many seconds at a time."""

    owner: str
    lease: float


def check(before: str, after: RunStatus) -> None:
    """Refuse a transition that the table does not allow. Compare-and-set in SQL does the rest."""
    if after not in TRANSITIONS[RunStatus(before)]:
        raise AssertionError(f"run status {before} → {after}")


async def lock_thread(tx: AsyncSession, thread_id: UUID) -> Thread | None:
    """Lock a thread's row without asking whose it is: for the engine, which acts on what was admitted before."""
    return await tx.scalar(LOCK, {"thread_id": thread_id})


async def insert(tx: AsyncSession, run: Run, claimant: Claimant | None) -> Run:
    """Insert a run: claimed at once when a claimant is given (the thread must be free), else pending."""
    values = {
        "id": run.id,
        "tenant_id": run.tenant_id,
        "thread_id": run.thread_id,
        "assistant_id": run.assistant_id,
        "assistant_version": run.assistant_version,
        "graph_id": run.graph_id,
        "subject": run.subject,
        "kind": run.kind,
        "kwargs": orjson.dumps(run.kwargs).decode(),
        "metadata": orjson.dumps(run.metadata_).decode(),
        "strategy": run.multitask_strategy,
        "delay": None,
        "owner": None,
        "lease": 0.0,
        "claimed": claimant is not None,
    }
    if claimant:
        values |= {"owner": claimant.owner, "lease": claimant.lease}
    values["delay"] = run.kwargs.get("after_seconds") or None
    inserted: Run = (await tx.execute(INSERT, values)).scalar_one()
    return inserted


async def claim_next(tx: AsyncSession, thread: Thread, claimant: Claimant, *, paused: bool) -> Run | None:
    """Claim what the (locked) thread should run now: a run whose lease has expired, else the first that is due.

    Returns None while another process runs the thread, or when there is nothing to run. `paused`: the thread waits for a
    human, so that only answers may run.
    """
    params = {"thread_id": thread.id, "owner": claimant.owner, "lease": claimant.lease}
    query = CLAIM_ANSWERS if paused else CLAIM
    return (await tx.execute(query, params)).scalar_one_or_none()


async def renew(tx: AsyncSession, claimant: Claimant, held: list[UUID]) -> dict[UUID, tuple[int, str | None]]:
    """Renew the leases of what this process executes, in one statement. Returns `{run: (epoch, cancel)}` of what is its own.

    A row that names this process but is not executed here (its commit was never answered) is left to expire.
    """
    rows = await tx.execute(
        text("""
            UPDATE runs SET lease_until = now() + make_interval(secs => :lease)
            WHERE id = ANY(:held) AND owner = :owner AND status = 'running' RETURNING id, epoch, cancel
        """),
        {"owner": claimant.owner, "lease": claimant.lease, "held": held},
    )
    return {row.id: (row.epoch, row.cancel) for row in rows}


async def finish(
    tx: AsyncSession,
    run: Run,
    status: RunStatus,
    reason: StopReason,
    error: dict[str, Any] | None = None,
    *,
    rolled_back: bool = False,
) -> bool:
    """End a running run under its epoch. False when it must not end so, and everything is to be discarded:

    it is not this process' any more, or somebody asked for it to be rolled back (see `wants_rollback`).
    """
    check(RunStatus.running, status)
    ended = await tx.scalar(
        FINISH,
        {
            "id": run.id,
            "epoch": run.epoch,
            "status": status,
            "reason": reason,
            "rolled_back": rolled_back,
            "error": orjson.dumps(error).decode() if error is not None else None,
        },
    )
    return ended is not None


async def release(tx: AsyncSession, run: Run, reason: StopReason) -> bool:
    """Give a running run back: it goes on from its last checkpoint anywhere, at once. A drain does not count as an attempt."""
    row = await tx.execute(
        RELEASE, {"id": run.id, "epoch": run.epoch, "reason": reason, "uncounted": int(reason is StopReason.drained)}
    )
    return bool(row.rowcount)  # type: ignore[attr-defined]


async def wants_rollback(tx: AsyncSession, run: Run) -> bool:
    """Whether the run is still this process', and somebody asked for it to be undone."""
    found = await tx.scalar(
        text("SELECT 1 FROM runs WHERE id = :id AND epoch = :epoch AND status = 'running' AND cancel = 'rollback'"),
        {"id": run.id, "epoch": run.epoch},
    )
    return found is not None


async def cancel(
    tx: AsyncSession, thread: Thread, run_ids: Iterable[UUID], action: CancelAction
) -> tuple[list[UUID], list[UUID], bool]:
    """Cancel runs of a (locked) thread. Returns those ended at once, those told to stop, and whether one of these waits.

    A run that never began becomes terminal here. One that did is marked, for the process that runs it or claims it next: it
    alone knows what became of the state. A wish to roll back is never taken back.
    """
    params = {"thread_id": thread.id, "ids": list(run_ids)}
    ended = await tx.execute(
        text("""
            UPDATE runs SET status = 'interrupted', stop_reason = 'cancelled', finished_at = now(), updated_at = now()
            WHERE thread_id = :thread_id AND id = ANY(:ids) AND status = 'pending' AND epoch = 0 RETURNING id
        """),
        params,
    )
    rows = await tx.execute(
        text("""
            UPDATE runs SET cancel = CASE WHEN cancel = 'rollback' THEN cancel ELSE :action END, updated_at = now()
            WHERE thread_id = :thread_id AND id = ANY(:ids) AND status IN ('running', 'pending') RETURNING id, status
        """),
        params | {"action": action},
    )
    told = list(rows)
    return list(ended.scalars()), [row.id for row in told], any(row.status == RunStatus.pending for row in told)


async def forget(tx: AsyncSession, run_ids: list[UUID]) -> None:
    """Delete runs that were rolled back: they never were."""
    await tx.execute(text("DELETE FROM runs WHERE id = ANY(:ids)"), {"ids": run_ids})


async def go_on(tx: AsyncSession, thread_id: UUID) -> bool:
    """No question stands before queued input any more. Returns whether there is such input."""
    freed = await tx.execute(
        text("UPDATE runs SET waiting_for = NULL WHERE thread_id = :thread_id AND status = 'pending' RETURNING id"),
        {"thread_id": thread_id},
    )
    return freed.first() is not None


async def wait_for_human(tx: AsyncSession, thread_id: UUID) -> None:
    """Say of queued input that a question stands before it."""
    await tx.execute(
        text("UPDATE runs SET waiting_for = 'human' WHERE thread_id = :thread_id AND status = 'pending' AND kind = 'input'"),
        {"thread_id": thread_id},
    )


async def expire(tx: AsyncSession, owners: list[str]) -> None:
    """End the leases of processes that are known to be dead, so that their runs go on at once."""
    await tx.execute(
        text("UPDATE runs SET lease_until = now() - interval '1 second' WHERE status = 'running' AND owner = ANY(:owners)"),
        {"owners": owners},
    )


async def mark_busy(tx: AsyncSession, thread_id: UUID) -> None:
    """The thread has a run that is not over."""
    await tx.execute(text("UPDATE threads SET status = 'busy', updated_at = now() WHERE id = :id"), {"id": thread_id})
