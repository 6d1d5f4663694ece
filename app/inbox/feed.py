"""The live inbox: a snapshot of what is pending, then every change, resumable on any replica.

One reader per process reads new events for all its subscribers; a subscriber that is behind what memory holds reads the
table itself. NOTIFY is only a hint. An event is read once all transactions older than its own are over, so that none is
ever skipped, however they commit.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import structlog
from psycopg import Error as DatabaseError
from psycopg_pool import PoolTimeout
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.codec import dumps
from app.db.engine import Database
from app.db.listen import Listener
from app.inbox import queries
from app.inbox.items import CHANNEL, item_json
from app.inbox.schemas import ItemQuery
from app.streaming.channel import Frame

log = structlog.get_logger(__name__)

Position = tuple[int, int]
"""Transaction and event, compared as numbers. On the wire the event's id `<transaction>-<event>`."""

LAST = 10**18 - 1
"""Behind every event of a transaction."""
SNAPSHOT = 200
BATCH = 500
MEMORY = 2000
IMPATIENT = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Pauses in which the reader looks again while an older transaction is still open."""

ID = re.compile(r"(\d{1,18})-(\d{1,18})")

# `safe`: no transaction that is still open can add an event before this one. Ids that are still to come were given by
# another cluster, from which this database was restored.
READ = """
    SELECT tenant_id, xid::text::bigint AS xid, id, event, data::text AS data,
           xid < pg_snapshot_xmin(pg_current_snapshot()) AS safe
    FROM inbox_events
    WHERE (xid, id) > (%(xid)s::text::xid8, %(id)s) AND xid < pg_snapshot_xmax(pg_current_snapshot())
      AND (%(tenant)s::text IS NULL OR tenant_id = %(tenant)s)
    ORDER BY xid, id LIMIT %(limit)s
"""
HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint - 1 AS xid"
KNOWN = "SELECT %(xid)s::text::xid8 < pg_snapshot_xmax(pg_current_snapshot()) AS known"


@dataclass(frozen=True, slots=True)
class Told:
    """An event and whose it is."""

    tenant: str
    frame: Frame

    @property
    def position(self) -> Position:
        """Where it stands in the feed."""
        return self.frame.id


def parse_position(value: str | None) -> Position | None:
    """The position that `Last-Event-ID` names; None, which means a snapshot first, where it names none."""
    match = ID.fullmatch(value.strip()) if value is not None else None
    return (int(match[1]), int(match[2])) if match else None


class InboxFeed:
    """Reads new events once for the whole process and hands them to its subscribers."""

    def __init__(self, database: Database, listener: Listener, *, heartbeat_seconds: float) -> None:
        self._database = database
        self._heartbeat = heartbeat_seconds
        self._recent: deque[Told] = deque(maxlen=MEMORY)
        self._start: Position = (0, 0)  # memory holds everything behind this
        self._end: Position | None = None  # read up to here; None while nobody listens
        self._subscribers = 0
        self._beats = 0
        self._work = asyncio.Event()
        self._changed = asyncio.Event()
        self._shut = False
        listener.subscribe(CHANNEL, self._notified)

    # -- reading for everybody

    async def run(self) -> None:
        """Read and hand out until cancelled."""
        loop = asyncio.get_running_loop()
        due, impatience = loop.time() + self._heartbeat, 0
        while not self._shut:
            waiting = impatience and self._subscribers
            pause = IMPATIENT[min(impatience, len(IMPATIENT)) - 1] if waiting else due - loop.time()
            try:
                async with asyncio.timeout(max(pause, 0)):
                    await self._work.wait()
            except TimeoutError:
                pass
            self._work.clear()
            beat = loop.time() >= due
            if beat:
                due = loop.time() + self._heartbeat
            try:
                news, impatience = await self._read(impatience)
            except (DatabaseError, PoolTimeout) as error:
                log.warning("inbox_feed_unread", error=str(error))
                news, impatience = False, 0
            if beat:
                self._beats += 1
            if news or beat:
                self._wake()

    async def _read(self, impatience: int) -> tuple[bool, int]:
        """Read what is safe. Returns whether there was something, and how often in a row something was not safe yet."""
        if not self._subscribers:
            self._end = None
            return False, 0
        news = False
        if self._end is None:
            self._recent.clear()
            self._end = self._start = await self._horizon()
            news = True  # whoever came before this was read must look at the table once more
        while True:
            told, unsafe = await self._after(self._end, None)
            for one in told:
                if len(self._recent) == MEMORY:
                    self._start = self._recent[0].position
                self._recent.append(one)
                self._end = one.position
            news = news or bool(told)
            if unsafe or len(told) < BATCH:
                return news, (1 if told else impatience + 1) if unsafe else 0

    async def _after(self, position: Position, tenant: str | None) -> tuple[list[Told], bool]:
        """The next safe events, and whether some are not safe yet."""
        params = {"xid": str(position[0]), "id": position[1], "tenant": tenant, "limit": BATCH}
        async with self._database.pool.connection() as connection:
            rows = await (await connection.execute(READ, params)).fetchall()
        told: list[Told] = []
        for row in rows:
            if not row["safe"]:
                return told, True
            frame = Frame.make(row["xid"], row["id"], row["event"], row["data"].encode())
            told.append(Told(row["tenant_id"], frame))
        return told, False

    async def _horizon(self) -> Position:
        """A position that every event which is not visible yet comes behind."""
        async with self._database.pool.connection() as connection:
            row = await (await connection.execute(HORIZON)).fetchone()
        assert row is not None
        return row["xid"], LAST

    async def _known(self, position: Position) -> bool:
        """Whether this database has come as far as the position: it may have been restored from another one."""
        async with self._database.pool.connection() as connection:
            row = await (await connection.execute(KNOWN, {"xid": str(position[0])})).fetchone()
        return bool(row and row["known"])

    # -- subscribers

    async def subscribe(self, principal: Principal, *, after: Position | None) -> AsyncIterator[list[Frame]]:
        """Changes of the tenant's items behind `after`; with None a snapshot first. An empty list is a heartbeat."""
        if after is not None and await self._known(after):
            return self._follow(principal.tenant, after, None)
        snapshot = await self._snapshot(principal)
        return self._follow(principal.tenant, snapshot.id, snapshot)

    async def _follow(self, tenant: str, after: Position, first: Frame | None) -> AsyncIterator[list[Frame]]:
        self._subscribers += 1
        self._work.set()
        try:
            beats = self._beats
            if first is not None:
                yield [first]
            while not self._shut:
                changed = self._changed
                frames, after = await self._next(tenant, after)
                if frames:
                    yield frames
                elif beats != self._beats:
                    beats = self._beats
                    yield []
                else:
                    await changed.wait()
        finally:
            self._subscribers -= 1

    async def _next(self, tenant: str, after: Position) -> tuple[list[Frame], Position]:
        """What the subscriber has not had, from memory or from the table, and its new position."""
        if self._end is None or after < self._start:
            try:
                told, _ = await self._after(after, tenant)
            except (DatabaseError, PoolTimeout) as error:
                log.warning("inbox_feed_unread", error=str(error))
                return [], after
            if told:
                return [one.frame for one in told], told[-1].position
            # Nothing of this tenant in the table: all that memory does not hold is behind it.
            return [], after if self._end is None else max(after, self._start)
        frames = [one.frame for one in self._recent if one.tenant == tenant and one.position > after]
        return frames, max(after, self._end)

    async def _snapshot(self, principal: Principal) -> Frame:
        """The first pending items and how many there are; its id is a position that no later change is before."""
        async with self._database.transaction() as tx:
            await tx.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            horizon = await _xid_horizon(tx)
            items, cursor = await queries.page(tx, principal, ItemQuery(status=["pending"], cursor=None, limit=SNAPSHOT))
            counts = await queries.counts(tx, principal)
            data: dict[str, Any] = {
                "items": [item_json(item) for item in items],
                "next_cursor": cursor,
                "counts": counts.model_dump(),
            }
        return Frame.make(horizon, LAST, "snapshot", dumps(data))

    # --

    def shut(self) -> None:
        """End all streams; clients come back with their last id, to whichever replica."""
        self._shut = True
        self._work.set()
        self._wake()

    def _notified(self, _: str | None) -> None:
        self._work.set()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _xid_horizon(tx: AsyncSession) -> int:
    """As `InboxFeed._horizon`, in the snapshot of a transaction."""
    return int(await tx.scalar(text(HORIZON)) or 0)
