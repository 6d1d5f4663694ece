"""LangGraph's checkpoints in the stock tables, written in batches.

Same tables, rows and reads as `AsyncPostgresSaver`, which can open the same database. What differs: no lock around the
process, and writes of all concurrent runs that come while a statement is in flight go out together in the next one. An
await returns only when its rows are committed; for the one exception see `Saver.trailing`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import orjson
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
    get_serializable_checkpoint_metadata,
)
from langgraph.checkpoint.postgres import _ainternal
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from psycopg import AsyncCursor
from psycopg.rows import DictRow, dict_row

from app.codec import check_size
from app.db.engine import LangGraphPool
from app.graphs.saver_history import ChannelHistories
from app.graphs.saver_queue import WriteQueue
from app.graphs.saver_rows import Row
from app.graphs.saver_sql import COPY_THREAD, DELETE_RUNS, DELETE_THREAD, PRUNE_THREADS

INLINE_BYTES = 64 * 1024
"""Values that may be larger are encoded in a thread, so that they do not hold up the loop."""
NEW_THREAD: ContextVar[str | None] = ContextVar("NEW_THREAD", default=None)
"""A thread that is known to have no checkpoints yet: the next read of it in this context, which starts its run, is spared."""


class Saver(AsyncPostgresSaver):
    """The saver of a process: one for all its runs. Opened by `Saver.open`."""

    def __init__(self, pool: LangGraphPool, queue: WriteQueue, serde: SerializerProtocol | None = None) -> None:
        super().__init__(pool, serde=serde)
        self._pool = pool
        self._queue = queue
        self._histories = ChannelHistories(pool)
        self._trails = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        pool: LangGraphPool,
        serde: SerializerProtocol | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> AsyncIterator[Saver]:
        """A saver that can write. Whatever waits when it is closed fails. `may_write`: see `WriteQueue`."""
        queue = WriteQueue(pool, may_write)
        async with queue.running():
            yield cls(pool, queue, serde)

    def trailing(self) -> Saver:
        """The same saver for graphs whose checkpoints hold only what they add, and so wait for the writes that they add.

        Writes of a task return at once, and are committed together with the checkpoint that they lead to. They never come
        after it, nor after a question or a read of the thread; without any of these they follow by themselves.
        """
        twin = copy.copy(self)
        twin._trails = True
        return twin

    # -- writing

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint. See `BaseCheckpointSaver.aput`."""
        configurable = config["configurable"]
        thread_id, namespace = configurable["thread_id"], configurable["checkpoint_ns"]
        inline: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for channel, value in checkpoint["channel_values"].items():
            if isinstance(value, _DeltaSnapshot):
                values[channel], inline[channel] = value, True
            elif value is None or isinstance(value, str | int | float | bool):
                inline[channel] = value
            else:
                values[channel] = value
        versions = {channel: version for channel, version in new_versions.items() if channel in values}
        operation = self._queue.operation()
        if versions:
            operation.blobs = await self._encode(self._dump_blobs, values, thread_id, namespace, values, versions)
        row = (
            thread_id,
            namespace,
            checkpoint["id"],
            configurable.get("checkpoint_id"),
            _json({**checkpoint, "channel_values": inline}),
            _json(get_serializable_checkpoint_metadata(config, metadata)),
        )
        check_size(len(row[4]))
        operation.checkpoints = [row]
        await self._queue.write(thread_id, operation)
        return {"configurable": {"thread_id": thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint["id"]}}

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save the writes of a task. See `BaseCheckpointSaver.aput_writes`."""
        configurable = config["configurable"]
        thread_id = configurable["thread_id"]
        rows = await self._encode(
            self._dump_writes,
            writes,
            thread_id,
            configurable["checkpoint_ns"],
            configurable["checkpoint_id"],
            task_id,
            task_path,
            writes,
        )
        if not rows:
            return
        special = [channel in WRITES_IDX_MAP for channel, _ in writes]
        if self._trails and not any(special):
            self._queue.trail(thread_id, rows)
            return
        operation = self._queue.operation()
        if all(special):
            operation.replaced = rows
        else:
            operation.kept = rows
        await self._queue.write(thread_id, operation)

    async def _encode(self, dump: Any, values: Any, *args: Any) -> list[Row]:
        """Encode here when it is small, in a thread when it may not be."""
        if _is_small(values):
            rows: list[Row] = dump(*args)
        else:
            rows = await asyncio.to_thread(dump, *args)
        for row in rows:
            check_size(len(row[-1] or b""))
        return rows

    # -- reading

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Read a checkpoint. See `BaseCheckpointSaver.aget_tuple`."""
        if (thread_id := config["configurable"]["thread_id"]) == NEW_THREAD.get():
            NEW_THREAD.set(None)
            return None
        await self._queue.settle(thread_id)
        return await super().aget_tuple(config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """List checkpoints, newest first. See `BaseCheckpointSaver.alist`."""
        await self._queue.settle(config["configurable"]["thread_id"] if config else None)
        async for found in super().alist(config, filter=filter, before=before, limit=limit):
            yield found

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What channels that save only updates are made of. See `BaseCheckpointSaver.aget_delta_channel_history`."""
        configurable = config["configurable"]
        thread_id, namespace = configurable["thread_id"], configurable.get("checkpoint_ns", "")
        checkpoint_id = get_checkpoint_id(config)
        if not checkpoint_id:
            newest = await self.aget_tuple(config)
            if newest is None:
                return {channel: {"writes": []} for channel in channels}
            checkpoint_id = newest.config["configurable"]["checkpoint_id"]
        await self._queue.settle(thread_id)
        return {
            channel: await self._histories.read(self.serde, thread_id, namespace, checkpoint_id, channel)
            for channel in channels
        }

    async def _load_checkpoint_tuple(self, value: DictRow) -> CheckpointTuple:
        """The stock one decodes in a thread, even when there is nothing to decode."""
        writes = value["pending_writes"]
        if writes and sum(len(write[3]) for write in writes) > INLINE_BYTES:
            return await super()._load_checkpoint_tuple(value)
        found = await super()._load_checkpoint_tuple({**value, "pending_writes": None})
        return found._replace(pending_writes=self._load_writes(writes))

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        """A cursor of the pool. The stock one takes a lock of the whole process first, though a pool needs none."""
        async with _ainternal.get_connection(self._pool) as connection:
            if pipeline:
                async with connection.pipeline(), connection.cursor(binary=True, row_factory=dict_row) as cursor:
                    yield cursor
            else:
                async with connection.cursor(binary=True, row_factory=dict_row) as cursor:
                    yield cursor

    # -- whole threads

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Give a thread that has none all checkpoints of another."""
        await self._queue.settle(source_thread_id)
        await self._execute(COPY_THREAD, {"source": source_thread_id, "target": target_thread_id})

    async def adelete_thread(self, thread_id: str) -> None:
        """Forget all state of a thread."""
        await self._queue.settle(thread_id)
        self._histories.forget(thread_id)
        await self._execute(DELETE_THREAD, {"thread": str(thread_id)})

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, but for those that later ones of other runs are made of."""
        await self._queue.settle(None)
        await self._execute(DELETE_RUNS, {"runs": list(run_ids), "thread": None})

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`keep_latest`: keep the newest checkpoint of each namespace and what it is made of; `delete`: keep nothing."""
        if isinstance(thread_ids, str):
            raise TypeError("thread_ids must be a sequence of thread IDs, not a str")
        if strategy == "delete":
            for thread_id in thread_ids:
                await self.adelete_thread(thread_id)
        elif strategy == "keep_latest":
            for thread_id in thread_ids:
                await self._queue.settle(thread_id)
            await self._execute(PRUNE_THREADS, {"threads": [str(thread_id) for thread_id in thread_ids]})
        else:
            raise ValueError(f"Unknown prune strategy: {strategy!r}")

    async def _execute(self, query: str, params: dict[str, Any]) -> None:
        async with self._pool.connection() as connection:
            # Planned for these very threads: few are huge, and a plan for the average thread is slow on them.
            await connection.execute(query, params, prepare=False)


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, which jsonb can hold
        return json.dumps(value).encode()


def _is_small(value: Any) -> bool:
    """A guess whether a value is encoded in no time, from its texts and its number of parts. Looks no further than it must."""
    room = INLINE_BYTES
    parts = [value]
    while parts and room >= 0:
        part = parts.pop()
        if isinstance(part, str | bytes):
            room -= len(part)
        elif isinstance(part, dict | list | tuple | deque):  # the writes of a task are a deque
            room -= 16 * len(part)
            if room >= 0:
                parts.extend(part.values() if isinstance(part, dict) else part)
        else:
            room -= 64
            if (content := getattr(part, "content", None)) is not None:
                parts.append(content)
    return room >= 0
