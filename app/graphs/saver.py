"""LangGraph's checkpoints in the stock tables, written in batches.

Same tables, rows and reads as `AsyncPostgresSaver`, which can open the same database. What differs: no lock around the
process, and writes of all concurrent runs that come while a statement is in flight go out together in the next one. An
await returns only when its rows are committed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    get_serializable_checkpoint_metadata,
)
from langgraph.checkpoint.postgres import _ainternal
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from psycopg import AsyncCursor
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import Jsonb

from app.db.engine import LangGraphPool
from app.graphs.review import LeaseLost

FLUSHERS = 2
"""Statements in flight at once: while one waits for its commit, the next can be built."""
INLINE_BYTES = 64 * 1024
"""Values that may be larger are encoded in a thread, so that they do not hold up the loop."""

Row = tuple[Any, ...]

WRITES = """
INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
SELECT * FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::text[], %b::int[], %b::text[], %b::text[], %b::bytea[])
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) DO """
KEEP = WRITES + "NOTHING"
REPLACE = WRITES + "UPDATE SET channel = EXCLUDED.channel, type = EXCLUDED.type, blob = EXCLUDED.blob"
BLOBS = """
INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
SELECT * FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::text[], %b::bytea[])
ON CONFLICT (thread_id, checkpoint_ns, channel, version) DO NOTHING"""
CHECKPOINTS = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata)
SELECT * FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::jsonb[], %b::jsonb[])
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id)
DO UPDATE SET checkpoint = EXCLUDED.checkpoint, metadata = EXCLUDED.metadata"""

PARTS = (("blobs", BLOBS, 6, 4), ("kept", KEEP, 9, None), ("replaced", REPLACE, 9, None), ("checkpoints", CHECKPOINTS, 6, 3))
"""Attribute of an operation, its statement, its columns, and how many of these are the key (writes: see `_key`)."""


@dataclass(slots=True, eq=False)
class Operation:
    """Rows of one `aput` or `aput_writes`, and who waits for them."""

    done: asyncio.Future[None]
    blobs: list[Row] = field(default_factory=list)
    kept: list[Row] = field(default_factory=list)
    replaced: list[Row] = field(default_factory=list)
    checkpoints: list[Row] = field(default_factory=list)


class Saver(AsyncPostgresSaver):
    """The saver of a process: one for all its runs. Opened by `Saver.open`."""

    def __init__(
        self, pool: LangGraphPool, serde: SerializerProtocol | None = None, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(pool, serde=serde)
        self._pool = pool
        self._waiting: list[Operation] = []
        self._work = asyncio.Event()
        self._may_write = may_write

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        pool: LangGraphPool,
        serde: SerializerProtocol | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> AsyncIterator[Saver]:
        """A saver with its flushers. Whatever waits when it is closed fails.

        `may_write` says whether this process still holds its runs. A process that was frozen for longer than its leases
        must not write over what its successor wrote meanwhile.
        """
        saver = cls(pool, serde, may_write)
        flushers = [asyncio.create_task(saver._flush(), name=f"saver-{i}") for i in range(FLUSHERS)]
        try:
            yield saver
        finally:
            for flusher in flushers:
                flusher.cancel()
            await asyncio.gather(*flushers, return_exceptions=True)
            for operation in saver._waiting:
                operation.done.cancel()

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
        operation = self._operation()
        if versions:
            operation.blobs = await self._encode(self._dump_blobs, values, thread_id, namespace, values, versions)
        row = (
            thread_id,
            namespace,
            checkpoint["id"],
            configurable.get("checkpoint_id"),
            _jsonb({**checkpoint, "channel_values": inline}),
            _jsonb(get_serializable_checkpoint_metadata(config, metadata)),
        )
        operation.checkpoints = [row]
        await self._write(operation)
        return {"configurable": {"thread_id": thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint["id"]}}

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save the writes of a task. See `BaseCheckpointSaver.aput_writes`."""
        configurable = config["configurable"]
        rows = await self._encode(
            self._dump_writes,
            writes,
            configurable["thread_id"],
            configurable["checkpoint_ns"],
            configurable["checkpoint_id"],
            task_id,
            task_path,
            writes,
        )
        if not rows:
            return
        operation = self._operation()
        if all(channel in WRITES_IDX_MAP for channel, _ in writes):
            operation.replaced = rows
        else:
            operation.kept = rows
        await self._write(operation)

    def _operation(self) -> Operation:
        return Operation(asyncio.get_running_loop().create_future())

    async def _encode(self, dump: Any, values: Any, *args: Any) -> list[Row]:
        """Encode here when it is small, in a thread when it may not be."""
        if _weight(values) < INLINE_BYTES:
            rows: list[Row] = dump(*args)
        else:
            rows = await asyncio.to_thread(dump, *args)
        return rows

    async def _write(self, operation: Operation) -> None:
        if not self._may_write():
            raise LeaseLost("The leases of this process have run out: another may hold its runs.")
        self._waiting.append(operation)
        self._work.set()
        await operation.done

    async def _flush(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(0)  # let whatever else this turn of the loop writes join
            batch = list(self._waiting)
            self._waiting.clear()  # never replaced: LangGraph may work with a shallow copy of this saver
            self._work.clear()
            if not batch:
                continue
            try:
                await self._execute(batch)
            except Exception as error:
                await self._isolate(batch, error)
            except BaseException:
                for operation in batch:
                    operation.done.cancel()
                raise
            else:
                _release(batch)

    async def _isolate(self, batch: list[Operation], error: Exception) -> None:
        """One bad row must not fail its neighbours: write them one by one."""
        for operation in batch:
            try:
                if len(batch) == 1:
                    raise error
                await self._execute([operation])
            except Exception as own:
                if not operation.done.done():
                    operation.done.set_exception(own)
            else:
                _release([operation])

    async def _execute(self, batch: list[Operation]) -> None:
        """Write all rows of a batch in one statement, which has only the parts that it needs."""
        parts: list[str] = []
        params: list[list[Any]] = []
        for name, statement, width, key in PARTS:
            rows = {_key(row, key): row for operation in batch for row in getattr(operation, name)}
            if rows:
                parts.append(statement)
                params += _columns(rows.values(), width)
        *before, last = parts
        prefix = ", ".join(f"p{i} AS ({part})" for i, part in enumerate(before))
        query = f"WITH {prefix} {last}" if before else last
        async with self._pool.connection() as connection:
            await connection.execute(query, params, binary=True)

    # -- reading

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


def _jsonb(value: Any) -> Jsonb:
    return Jsonb(value, dumps=_dumps)


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, which jsonb can hold
        return json.dumps(value).encode()


def _key(row: Row, width: int | None) -> Row:
    # A write is told apart by thread, namespace, checkpoint, task and index; its path stands between.
    return (*row[:4], row[5]) if width is None else row[:width]


def _columns(rows: Any, width: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def _release(batch: list[Operation]) -> None:
    for operation in batch:
        if not operation.done.done():
            operation.done.set_result(None)


def _weight(value: Any, depth: int = 0) -> int:
    """A cheap guess at the size of a value, from its texts and its number of parts."""
    if isinstance(value, str | bytes):
        return len(value)
    if depth > 3:
        return 64
    if isinstance(value, dict):
        return sum(_weight(v, depth + 1) for v in value.values()) + 16 * len(value)
    if isinstance(value, list | tuple):
        return sum(_weight(v, depth + 1) for v in value) + 16 * len(value)
    content = getattr(value, "content", None)
    return 256 + (_weight(content, depth + 1) if content is not None else 0)
