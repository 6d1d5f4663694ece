"""What a channel is made of that saves only its updates: reads from Postgres what this process has not read before.

Checkpoints that have a child never change, and neither do their ids come again, so what was read once stays true.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import DeltaChannelHistory, PendingWrite, writes_sort_key
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from psycopg.rows import tuple_row

from app.db.engine import LangGraphPool

CACHE_BYTES = 8 * 2**20
"""How much is kept, as it is encoded; decoded it is some ten times as large."""
INLINE_BYTES = 64 * 1024
"""More is decoded in a thread."""

WALK = """
WITH RECURSIVE chain AS (
    SELECT NULL::text AS id, c.parent_checkpoint_id AS parent, 0 AS depth, NULL::jsonb AS inline, NULL::text AS type,
           NULL::bytea AS blob
    FROM checkpoints c
    WHERE c.thread_id = %(thread)s AND c.checkpoint_ns = %(ns)s AND c.checkpoint_id = %(target)s
    UNION ALL
    SELECT c.checkpoint_id, c.parent_checkpoint_id, chain.depth + 1,
           nullif(c.checkpoint->'channel_values'->%(channel)s, 'null'), b.type, b.blob
    FROM chain
    JOIN checkpoints c ON c.thread_id = %(thread)s AND c.checkpoint_ns = %(ns)s AND c.checkpoint_id = chain.parent
    LEFT JOIN checkpoint_blobs b ON b.thread_id = %(thread)s AND b.checkpoint_ns = %(ns)s AND b.channel = %(channel)s
        AND b.version = c.checkpoint->'channel_versions'->>%(channel)s AND b.type <> 'empty'
    WHERE chain.type IS NULL AND chain.inline IS NULL AND chain.parent IS DISTINCT FROM %(known)s::text
)
SELECT chain.id, chain.parent, chain.inline, chain.type, chain.blob, w.task_path, w.task_id, w.idx, w.type, w.blob
FROM chain LEFT JOIN LATERAL (
    SELECT * FROM checkpoint_writes w
    WHERE w.thread_id = %(thread)s AND w.checkpoint_ns = %(ns)s AND w.checkpoint_id = chain.id AND w.channel = %(channel)s
    OFFSET 0  -- looked up one by one: joined on the thread alone, a long one would be gone through again and again
) w ON true
ORDER BY chain.depth DESC
"""
"""From a checkpoint's parent up to the first that has the channel's value, or to the last one known. The value's writes are
those of the child. The last row is the checkpoint itself, with nothing but its parent."""

Key = tuple[SerializerProtocol, str, str, str]


class Encoded(NamedTuple):
    """A value that may be changed by who gets it, so that each gets his own."""

    type: str
    blob: bytes


@dataclass(slots=True)
class Chain:
    """A line of checkpoints, from the one that has the channel's value to the newest that was read."""

    seed: Any = None
    seeded: bool = False
    newest: str | None = None
    writes: list[PendingWrite] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    """How many of the writes came before a checkpoint's own."""
    size: int = 0
    shared: bool = True
    """Whether all values are such that may be handed out themselves."""
    made: tuple[int, Any, Any] = (0, None, None)
    """What the channel once made of so many of the writes, for the channel to use. Nobody may change it."""


class Writes(list[PendingWrite]):
    """Writes of a chain from its beginning, for a channel that knows the chain's `made`."""

    def __init__(self, chain: Chain, count: int) -> None:
        super().__init__(chain.writes[:count])
        self.chain = chain


class ChannelHistories:
    """Histories of channels of the threads used last. One per process."""

    def __init__(self, pool: LangGraphPool) -> None:
        self._pool = pool
        self._chains: OrderedDict[Key, Chain] = OrderedDict()

    async def read(
        self, serde: SerializerProtocol, thread_id: str, namespace: str, checkpoint_id: str, channel: str
    ) -> DeltaChannelHistory:
        """A channel's stored value and the writes since, up to a checkpoint, as LangGraph replays them."""
        key = (serde, thread_id, namespace, channel)
        while True:
            chain = self._chains.get(key)
            if chain is not None and (count := chain.starts.get(checkpoint_id)) is not None:
                self._chains.move_to_end(key)
                return _history(serde, chain, count)
            known = chain.newest if chain is not None else None
            rows = await self._walk(thread_id, namespace, checkpoint_id, channel, known)
            if not rows:
                return {"writes": []}
            oldest = rows[0]
            joined = known is not None and oldest[1] == known and oldest[2] is None and oldest[3] is None
            size = sum(len(row[9] or b"") for row in rows) + len(oldest[4] or b"")
            if not joined:
                chain = Chain()
            assert chain is not None
            links = await asyncio.to_thread(_links, serde, rows) if size > INLINE_BYTES else _links(serde, rows)
            if joined and chain.newest != known:
                continue  # another reader was faster
            if not joined:
                _seed(serde, chain, oldest)
            for checkpoint, writes in links:
                chain.starts[checkpoint] = len(chain.writes)
                chain.writes += [(task, channel, value) for task, value in writes]
                chain.shared = chain.shared and not any(type(value) is Encoded for _, value in writes)
                chain.newest = checkpoint
            chain.size += size
            self._keep(key, chain)
            return _history(serde, chain, len(chain.writes))

    def forget(self, thread_id: str) -> None:
        """Drop what is known of a thread."""
        for key in [key for key in self._chains if key[1] == thread_id]:
            del self._chains[key]

    async def _walk(
        self, thread_id: str, namespace: str, checkpoint_id: str, channel: str, known: str | None
    ) -> list[tuple[Any, ...]]:
        params = {"thread": thread_id, "ns": namespace, "target": checkpoint_id, "channel": channel, "known": known}
        async with self._pool.connection() as connection, connection.cursor(binary=True, row_factory=tuple_row) as cursor:
            await cursor.execute(WALK, params)
            return await cursor.fetchall()

    def _keep(self, key: Key, chain: Chain) -> None:
        self._chains[key] = chain
        self._chains.move_to_end(key)
        size = sum(c.size for c in self._chains.values())
        while size > CACHE_BYTES:
            size -= self._chains.popitem(last=False)[1].size


def _seed(serde: SerializerProtocol, chain: Chain, row: tuple[Any, ...]) -> None:
    inline, type_, blob = row[2:5]
    chain.seeded = type_ is not None or inline is not None
    chain.seed = _value(serde, type_, blob) if type_ is not None else inline
    chain.shared = type(chain.seed) is not Encoded


def _links(serde: SerializerProtocol, rows: list[tuple[Any, ...]]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Writes by checkpoint, oldest first, in the order in which the channel took them."""
    by_checkpoint: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        if row[0] is not None:
            found = by_checkpoint.setdefault(row[0], [])
            if row[6] is not None:
                found.append(row[5:])
    for found in by_checkpoint.values():
        found.sort(key=lambda w: writes_sort_key(w[0], w[1], w[2]))
    return [(c, [(w[1], _value(serde, w[3], w[4])) for w in found]) for c, found in by_checkpoint.items()]


def _value(serde: SerializerProtocol, type_: str, blob: bytes) -> Any:
    value = serde.loads_typed((type_, blob))
    inner = value.value if isinstance(value, _DeltaSnapshot) else value
    messages = inner if isinstance(inner, list) else [inner]
    # A graph must not change messages of its state in place, and shares them between its own steps all the same.
    return value if all(isinstance(m, BaseMessage) for m in messages) else Encoded(type_, blob)


def _history(serde: SerializerProtocol, chain: Chain, count: int) -> DeltaChannelHistory:
    if not chain.shared:
        return _decoded(serde, chain, count)
    found: DeltaChannelHistory = {"writes": Writes(chain, count)}
    if chain.seeded:
        seed = chain.seed
        if isinstance(seed, _DeltaSnapshot):
            seed = _DeltaSnapshot(list(seed.value))
        found["seed"] = list(seed) if isinstance(seed, list) else seed
    return found


def _decoded(serde: SerializerProtocol, chain: Chain, count: int) -> DeltaChannelHistory:
    def own(value: Any) -> Any:
        return serde.loads_typed(value) if type(value) is Encoded else value

    found: DeltaChannelHistory = {"writes": [(task, channel, own(value)) for task, channel, value in chain.writes[:count]]}
    if chain.seeded:
        found["seed"] = own(chain.seed)
    return found
