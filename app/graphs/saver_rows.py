"""Rows for LangGraph's checkpoint tables, and the one statement that writes those of a batch."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

Row = tuple[Any, ...]

WRITES = """
INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
SELECT * FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::text[], %b::int[], %b::text[], %b::text[], %b::bytea[])
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) DO """
KEPT = WRITES + "NOTHING"
REPLACED = WRITES + "UPDATE SET channel = EXCLUDED.channel, type = EXCLUDED.type, blob = EXCLUDED.blob"
BLOBS = """
INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
SELECT * FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::text[], %b::bytea[])
ON CONFLICT (thread_id, checkpoint_ns, channel, version) DO NOTHING"""
CHECKPOINTS = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata)
SELECT * FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::jsonb[], %b::jsonb[])
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id)
DO UPDATE SET checkpoint = EXCLUDED.checkpoint, metadata = EXCLUDED.metadata"""


@dataclass(slots=True, eq=False)
class Operation:
    """Rows that are written together or not at all, and who waits for them."""

    done: asyncio.Future[None]
    answered: bool = False
    """Whether its rows are committed, or have failed for good."""
    blobs: list[Row] = field(default_factory=list)
    kept: list[Row] = field(default_factory=list)
    """Writes of tasks: the first of a key stays."""
    replaced: list[Row] = field(default_factory=list)
    """Questions, answers and errors: the last of a key stays."""
    checkpoints: list[Row] = field(default_factory=list)


class Packed(bytes):
    """An array in Postgres' binary format. Its type is that of the cast in the statement."""


class PackedDumper(Dumper):
    """Sends it as it is: psycopg's own way to arrays costs more than all the rest of a small statement."""

    format = Format.BINARY

    def dump(self, obj: Packed) -> bytes:
        """The bytes on the wire."""
        return obj


psycopg.adapters.register_dumper(Packed, PackedDumper)

HEAD = struct.Struct("!iiIii").pack
LENGTH = struct.Struct("!i").pack
NULL = LENGTH(-1)
JSONB = b"\x01"


def _array(oid: int, cells: list[bytes | None]) -> Packed:
    parts = [HEAD(1, int(None in cells), oid, len(cells), 1)]
    for cell in cells:
        if cell is None:
            parts.append(NULL)
        else:
            parts += (LENGTH(len(cell)), cell)
    return Packed(b"".join(parts))


def _texts(column: Iterable[Any]) -> Packed:
    return _array(25, [cell if cell is None else str(cell).encode() for cell in column])


def _ints(column: Iterable[int]) -> Packed:
    return _array(23, [LENGTH(cell) for cell in column])


def _bytes(column: Iterable[bytes | None]) -> Packed:
    return _array(17, [cell if cell is None else bytes(cell) for cell in column])


def _jsonbs(column: Iterable[bytes]) -> Packed:
    return _array(3802, [JSONB + cell for cell in column])


Pack = Callable[[Any], Packed]
WRITE_COLUMNS: tuple[Pack, ...] = (_texts, _texts, _texts, _texts, _texts, _ints, _texts, _texts, _bytes)
BLOB_COLUMNS: tuple[Pack, ...] = (_texts, _texts, _texts, _texts, _texts, _bytes)
CHECKPOINT_COLUMNS: tuple[Pack, ...] = (_texts, _texts, _texts, _texts, _jsonbs, _jsonbs)


@cache
def _statement(parts: tuple[str, ...]) -> str:
    *before, last = parts
    prefix = ", ".join(f"p{i} AS ({part})" for i, part in enumerate(before))
    return f"WITH {prefix} {last}" if before else last


def statement(batch: Sequence[Operation]) -> tuple[str, list[Packed]]:
    """One statement for all rows of a batch, with only the parts that it needs, and its parameters."""
    parts: list[str] = []
    params: list[Packed] = []

    def add(part: str, rows: Iterable[Row], columns: tuple[Pack, ...]) -> None:
        if rows:
            parts.append(part)
            params.extend(pack(column) for pack, column in zip(columns, zip(*rows, strict=True), strict=True))

    add(BLOBS, [row for operation in batch for row in operation.blobs], BLOB_COLUMNS)
    add(KEPT, [row for operation in batch for row in operation.kept], WRITE_COLUMNS)
    # One statement cannot change a row twice. A write is told apart by thread, namespace, checkpoint, task and index.
    replaced = {(*row[:4], row[5]): row for operation in batch for row in operation.replaced}
    add(REPLACED, replaced.values(), WRITE_COLUMNS)
    add(CHECKPOINTS, {row[:3]: row for operation in batch for row in operation.checkpoints}.values(), CHECKPOINT_COLUMNS)
    return _statement(tuple(parts)), params
