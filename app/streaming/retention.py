"""How long events are kept: partitions of `run_events` are made ahead of time and dropped when they are old.

A partition holds the runs of some hours, by the time in front of their ids. Every process looks after this, one at a time. A
lock that is not to be had at once is left for the next round: nobody who writes or reads events waits for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import structlog
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, TimeoutError
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import Database

log = structlog.get_logger(__name__)

PERIOD = timedelta(hours=6)
AHEAD = 2
"""Partitions that are there before their time has come."""
INTERVAL_SECONDS = 15 * 60
PREFIX = "run_events_p"
LOCK_KEY = 0x4B657465  # "Kete"

PARTITIONS = text("""
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'run_events'::regclass ORDER BY c.relname
""")
NEEDED = text("""
SELECT 1 FROM runs WHERE id >= :low AND id < :high
  AND (status IN ('pending', 'running') OR finished_at > now() - make_interval(secs => :keep)) LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Partition:
    """The events of the runs that were made in the hours from `start` on."""

    start: datetime

    @classmethod
    def at(cls, time: datetime) -> Partition:
        """The one for runs made at a time."""
        seconds = int(PERIOD.total_seconds())
        return cls(datetime.fromtimestamp(int(time.timestamp()) // seconds * seconds, UTC))

    @classmethod
    def named(cls, name: str) -> Partition | None:
        """The one with a table's name; None for another table."""
        if not name.startswith(PREFIX):
            return None
        return cls(datetime.strptime(name.removeprefix(PREFIX), "%Y%m%d_%H").replace(tzinfo=UTC))

    @property
    def name(self) -> str:
        """Its table."""
        return f"{PREFIX}{self.start:%Y%m%d_%H}"

    @property
    def end(self) -> datetime:
        """When the next one starts."""
        return self.start + PERIOD

    @property
    def bounds(self) -> tuple[UUID, UUID]:
        """The first run id that it may hold, and the first that it may not."""
        return first_id(self.start), first_id(self.end)


def first_id(time: datetime) -> UUID:
    """The lowest UUIDv7 of a moment (RFC 9562: 48 bits of milliseconds in front)."""
    return UUID(int=int(time.timestamp() * 1000) << 80)


class Retention:
    """Keeps events for some hours after their run has ended."""

    def __init__(self, database: Database, *, hours: float) -> None:
        self._database = database
        self._keep = timedelta(hours=hours)

    async def run(self) -> None:
        """Look after the partitions now and then, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            try:
                await self.tidy()
            except (DBAPIError, TimeoutError) as error:
                log.warning("partitions_left_for_later", error=str(error))

    async def tidy(self, now: datetime | None = None) -> None:
        """Make partitions that will be needed, and drop those that are not needed any more. `now` is for tests."""
        now = now or datetime.now(UTC)
        wanted = [Partition.at(now + i * PERIOD) for i in range(AHEAD + 1)]
        there = await self._partitions()
        old = [p for p in there if p.end < now - self._keep]
        for partition in [p for p in wanted if p not in there]:
            await self._alone(partition, self._make)
        for partition in old:
            await self._alone(partition, self._drop)

    async def _partitions(self) -> list[Partition]:
        async with self._database.transaction() as tx:
            names = (await tx.scalars(PARTITIONS)).all()
        return [p for name in names if (p := Partition.named(name)) is not None]

    async def _alone(self, partition: Partition, action: Callable[[AsyncSession, Partition], Awaitable[None]]) -> None:
        """Do something to a partition, one process at a time, unless somebody holds a lock for longer than a moment."""
        try:
            async with self._database.transaction() as tx:
                await tx.execute(text("SET LOCAL lock_timeout = '1s'"))
                await tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
                await action(tx, partition)
        except DBAPIError as error:
            log.warning("partition_left_for_later", partition=partition.name, error=str(error.orig))

    async def _make(self, tx: AsyncSession, partition: Partition) -> None:
        low, high = partition.bounds
        name = partition.name
        if await tx.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is not None:
            return
        # Made beside and attached, which locks less than a partition that is made in its place.
        await tx.execute(text(f"CREATE TABLE {name} (LIKE run_events INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"))
        await tx.execute(
            text(f"""
                WITH early AS (DELETE FROM run_events_rest WHERE run_id >= :low AND run_id < :high RETURNING *)
                INSERT INTO {name} SELECT * FROM early
            """),
            {"low": low, "high": high},
        )
        await tx.execute(text(f"ALTER TABLE run_events ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')"))
        log.info("partition_made", partition=name)

    async def _drop(self, tx: AsyncSession, partition: Partition) -> None:
        low, high = partition.bounds
        keep = self._keep.total_seconds()
        if await tx.scalar(NEEDED, {"low": low, "high": high, "keep": keep}) is not None:
            return
        await tx.execute(text(f"DROP TABLE IF EXISTS {partition.name}"))
        log.info("partition_dropped", partition=partition.name)
