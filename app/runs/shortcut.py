"""The short way: on a thread that does nothing else, a run takes one statement to start and one to end.

Each is the whole transaction, and finds nothing (None, False) unless everything is as it usually is. Then the caller goes the
long way, which takes the thread's lock first and decides step by step. A single statement sees the tables as they were when
it began, so nothing here may rest on other rows than those that it locks: whoever gives the thread something to do also
changes its row, and a row that has changed since is not matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.db.engine import Database
from app.runs.models import Run, RunStatus
from app.runs.outcome import Outcome, jsonb, thread_status
from app.runs.queue import Claimant
from app.streaming.channel import Frame
from app.threads.state import public

START = """
WITH seen AS MATERIALIZED (
    SELECT id, xmin AS version FROM threads WHERE id = %(thread)s AND tenant_id = %(tenant)s AND status = 'idle'
), busy AS (
    UPDATE threads SET status = 'busy', updated_at = now(), error = NULL, metadata = metadata || %(ran)s::jsonb
    FROM seen
    WHERE threads.id = seen.id AND threads.xmin = seen.version  -- who waited for a lock has seen what was before it
      AND NOT EXISTS (SELECT 1 FROM runs WHERE thread_id = %(thread)s AND status = 'pending')
      AND NOT EXISTS (SELECT 1 FROM runs WHERE thread_id = %(thread)s AND status = 'running')
      AND EXISTS (SELECT 1 FROM assistants WHERE id = %(assistant)s AND version = %(version)s AND deleted_at IS NULL
                  AND tenant_id IN (%(tenant)s, 'system'))
    RETURNING threads.id
)
INSERT INTO runs (id, tenant_id, thread_id, assistant_id, assistant_version, graph_id, subject, kind, kwargs, metadata,
    multitask_strategy, status, epoch, attempts, owner, lease_until, started_at, base_checkpoint_id)
SELECT %(id)s, %(tenant)s, id, %(assistant)s, %(version)s, %(graph)s, %(subject)s, 'input', %(kwargs)s::jsonb,
    %(metadata)s::jsonb, %(strategy)s, 'running', 1, 1, %(owner)s, now() + make_interval(secs => %(lease)s), now(),
    (SELECT max(checkpoint_id) FROM checkpoints WHERE thread_id = %(thread)s::text AND checkpoint_ns = '')
FROM busy
RETURNING created_at, base_checkpoint_id, pg_current_xact_id()::xid::text AS row_version
"""
END = """
WITH same AS MATERIALIZED (
    SELECT id FROM threads WHERE id = %(thread)s AND xmin = %(row_version)s::text::xid FOR UPDATE
), ended AS (
    UPDATE runs SET status = %(status)s, stop_reason = %(reason)s, owner = NULL, lease_until = NULL,
        finished_at = now(), updated_at = now()
    FROM same
    WHERE runs.id = %(id)s AND epoch = %(epoch)s AND runs.status = 'running' AND cancel IS NULL
    RETURNING runs.id
), settled AS (
    UPDATE threads SET status = %(thread_status)s, interrupts = '{}', error = NULL,
        "values" = coalesce(%(values)s::jsonb, "values"), assistant_id = %(assistant)s, assistant_version = %(version)s,
        graph_id = %(graph)s, updated_at = now(), state_updated_at = now()
    FROM ended WHERE threads.id = %(thread)s
), told AS (
    INSERT INTO run_events (run_id, epoch, seq, event, data)
    SELECT ended.id, %(epoch)s, e.* FROM ended, unnest(%(seqs)b::int[], %(events)b::text[], %(data)b::text[]) AS e
    ON CONFLICT DO NOTHING
)
SELECT id FROM ended
"""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was inserted claimed. `row_version` names the thread's row as the run left it."""

    run: Run
    row_version: str


class Shortcut:
    """Starts and ends runs in one statement each, where that is possible."""

    def __init__(self, database: Database) -> None:
        self._pool = database.pool

    async def start(self, run: Run, claimant: Claimant, ran: bytes) -> Started | None:
        """Insert a run, claimed by this process. None, and no change, if the thread is not idle or not the tenant's, or the
        assistant has another version by now. `ran` is merged into the thread's metadata.
        """
        params = {
            "id": run.id,
            "tenant": run.tenant_id,
            "thread": run.thread_id,
            "assistant": run.assistant_id,
            "version": run.assistant_version,
            "graph": run.graph_id,
            "subject": run.subject,
            "kwargs": orjson.dumps(run.kwargs).decode(),
            "metadata": orjson.dumps(run.metadata_).decode(),
            "strategy": run.multitask_strategy,
            "owner": claimant.owner,
            "lease": claimant.lease,
            "ran": ran.decode(),
        }
        async with self._pool.connection() as connection:
            row = await (await connection.execute(START, params)).fetchone()
        if row is None:
            return None
        run.status, run.epoch, run.attempts, run.owner = RunStatus.running, 1, 1, claimant.owner
        run.created_at = run.updated_at = run.started_at = row["created_at"]
        run.base_checkpoint_id = row["base_checkpoint_id"]
        return Started(run, row["row_version"])

    async def end(
        self, run: Run, row_version: str, outcome: Outcome, frames: Sequence[Frame], *, private: frozenset[str]
    ) -> bool:
        """End a run that asks nothing, with its last events. False, and no change, if the thread was given something else to
        do, or the run is cancelled or not this process' any more.
        """
        values = outcome.values
        params: dict[str, Any] = {
            "id": run.id,
            "thread": run.thread_id,
            "row_version": row_version,
            "epoch": run.epoch,
            "status": outcome.status,
            "reason": outcome.reason,
            "thread_status": thread_status(outcome),
            "values": jsonb(public(values, private)) if values is not None else None,
            "assistant": run.assistant_id,
            "version": run.assistant_version,
            "graph": run.graph_id,
            "seqs": [f.seq for f in frames],
            "events": [f.event for f in frames],
            "data": [f.data.decode() for f in frames],
        }
        async with self._pool.connection() as connection:
            return await (await connection.execute(END, params)).fetchone() is not None


def usual(run: Run, outcome: Outcome) -> bool:
    """Whether a run ended so that nobody else has to be told in the same transaction: it asks and answers nothing."""
    return not (outcome.needs_state or outcome.pending or outcome.breakpoint_nodes or outcome.next or run.kwargs.get("webhook"))
