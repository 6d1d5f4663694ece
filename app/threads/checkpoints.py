"""A thread's checkpoints inside our own transaction, so that state and rows change together or not at all.

The tables are those of LangGraph's Postgres saver.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph.state import CompiledStateGraph
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import driver_connection
from app.graphs.saver_sql import COPY_THREAD, DELETE_RUNS, DELETE_THREAD

Graph = CompiledStateGraph[Any, Any, Any, Any]

KEEP = text(
    """
    INSERT INTO run_base_writes (run_id, checkpoint_ns, checkpoint_id, task_id, idx, task_path, channel, type, blob)
    SELECT :run, checkpoint_ns, checkpoint_id, task_id, idx, task_path, channel, type, blob
    FROM checkpoint_writes WHERE thread_id = :id AND checkpoint_id >= :base
    ON CONFLICT DO NOTHING
    """
)
"""A question of a subgraph stands at a checkpoint of the subgraph's, which is newer than the thread's own."""

RESTORE = text(
    """
    WITH gone AS (
        DELETE FROM checkpoint_writes w USING (SELECT DISTINCT checkpoint_ns, checkpoint_id FROM checkpoints
            WHERE thread_id = :id AND checkpoint_id >= :base) c
        WHERE w.thread_id = :id AND w.checkpoint_ns = c.checkpoint_ns AND w.checkpoint_id = c.checkpoint_id
          AND NOT EXISTS (SELECT 1 FROM run_base_writes k WHERE k.run_id = :run AND k.checkpoint_ns = w.checkpoint_ns
              AND k.checkpoint_id = w.checkpoint_id AND k.task_id = w.task_id AND k.idx = w.idx)
    )
    INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
    SELECT :id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob
    FROM run_base_writes WHERE run_id = :run
    ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx)
    DO UPDATE SET channel = EXCLUDED.channel, type = EXCLUDED.type, blob = EXCLUDED.blob, task_path = EXCLUDED.task_path
    """
)
"""What was written to checkpoints that were there before the run began, as it was then."""


async def in_transaction(tx: AsyncSession, graph: Graph) -> Graph:
    """The same graph, saving into `tx`."""
    saver = graph.checkpointer
    serde = saver.serde if isinstance(saver, BaseCheckpointSaver) else None
    return graph.copy({"checkpointer": AsyncPostgresSaver(await driver_connection(tx), serde=serde)})


async def copy_checkpoints(tx: AsyncSession, source: UUID, target: UUID) -> None:
    """Give `target`, which has none, all checkpoints of `source`."""
    connection = await driver_connection(tx)
    await connection.execute(COPY_THREAD, {"source": str(source), "target": str(target)})


async def delete_checkpoints(tx: AsyncSession, thread_id: UUID) -> None:
    """Forget all state of a thread."""
    await (await driver_connection(tx)).execute(DELETE_THREAD, {"thread": str(thread_id)})


async def keep_base(tx: AsyncSession, thread_id: UUID, run_id: UUID, base: str) -> None:
    """Remember what is written to the checkpoint `base`, which a run is about to go on from."""
    await tx.execute(KEEP, {"id": str(thread_id), "run": run_id, "base": base})


async def undo_run(tx: AsyncSession, thread_id: UUID, run_id: UUID, base: str | None) -> None:
    """Bring a thread's state back to where it was before a run began: its checkpoints go, with all that they hold.

    `base` is the checkpoint that the run went on from as it was. An answer that the run brought sits in the writes of that
    checkpoint: they are put back as `keep_base` found them, so that the question is asked again.
    """
    await (await driver_connection(tx)).execute(DELETE_RUNS, {"thread": str(thread_id), "runs": [str(run_id)]})
    if base is not None:
        await tx.execute(RESTORE, {"id": str(thread_id), "run": run_id, "base": base})
