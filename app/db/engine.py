"""The pools of one process and the only place that commits.

SQLAlchemy serves our tables; a psycopg pool (autocommit, as LangGraph's saver and store need it) serves LangGraph and the
event log. Both speak psycopg 3 to the same database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import psycopg
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

LangGraphPool = AsyncConnectionPool[AsyncConnection[DictRow]]

AFTER_COMMIT = "after_commit"
HINTS = "hints"

NOTIFY = "SELECT pg_notify(c, p) FROM unnest(%b::text[], %b::text[]) AS hint (c, p)"

# A dead peer must be noticed in seconds, not after the kernel's two hours.
CONNECT_ARGS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def sqlalchemy_url(url: str) -> str:
    """`postgres://` or `postgresql://` with the driver that we use."""
    scheme, rest = url.split("://", 1)
    if not scheme.startswith("postgres"):
        raise ValueError("DATABASE_URL must start with postgresql://")
    return f"postgresql+psycopg://{rest}"


def psycopg_url(url: str) -> str:
    """The same address for psycopg itself, which knows no driver suffix."""
    return "postgresql://" + url.split("://", 1)[1]


class Notifier:
    """Sends notifications in the background, all that wait in one statement."""

    def __init__(self, pool: LangGraphPool) -> None:
        self._pool = pool
        self._waiting: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    def send(self, hints: Iterable[tuple[str, str]]) -> None:
        """Send `(channel, payload)` pairs soon."""
        self._waiting.update(hints)
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._send(), name="notifier")

    async def _send(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)
            hints, self._waiting = list(self._waiting), set()
            try:
                async with self._pool.connection() as connection:
                    await connection.execute(NOTIFY, [[c for c, _ in hints], [p for _, p in hints]])
            except (psycopg.Error, PoolTimeout, PoolClosed):
                return  # whoever waits for it looks by himself in a while

    def check(self) -> None:
        """Have the pool replace connections that died."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._pool.check(), name="pool-check")

    async def flush(self) -> None:
        """Wait for what is under way, before the pool is closed."""
        tasks = [task for task in (self._task, self._checking) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Database:
    """The database as one process sees it."""

    url: str
    engine: AsyncEngine
    sessions: async_sessionmaker[AsyncSession]
    pool: LangGraphPool
    notifier: Notifier

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A unit of work: commits when the block ends, rolls back when it raises. Keep it short."""
        async with self.sessions() as session:
            async with session.begin():
                yield session
            self.notifier.send(session.info.pop(HINTS, ()))
            for action in session.info.pop(AFTER_COMMIT, ()):
                action()

    def heal(self) -> None:
        """Replace connections that died, so that nobody else has to find them. Called when the listener has reconnected."""
        self.notifier.check()


def hint(tx: AsyncSession, channel: str, payload: str = "") -> None:
    """Tell all processes of something once the transaction has committed. They may miss it, so it is never the only way.

    Not sent by the transaction itself: Postgres lets only one that notifies commit at a time.
    """
    tx.info.setdefault(HINTS, set()).add((channel, payload))


def after_commit(tx: AsyncSession, action: Callable[[], object]) -> None:
    """Call `action` once the transaction has committed, and never if it does not."""
    tx.info.setdefault(AFTER_COMMIT, []).append(action)


async def driver_connection(session: AsyncSession) -> AsyncConnection[Any]:
    """The psycopg connection under an open transaction, for libraries that take one (Procrastinate, the event log)."""
    raw = await (await session.connection()).get_raw_connection()
    connection = raw.driver_connection
    assert isinstance(connection, AsyncConnection)
    return connection


@asynccontextmanager
async def open_database(
    url: str, *, pool_size: int = 20, name: str = "keyturn", pooled: bool = False
) -> AsyncIterator[Database]:
    """Open both pools on `url` and close them again. `name` shows in `pg_stat_activity`.

    `pooled`: behind `url` is a pooler that gives each transaction another session, so that none can be prepared for.
    """
    args = CONNECT_ARGS | {"application_name": name}
    engine = create_async_engine(
        sqlalchemy_url(url),
        pool_size=max(2, pool_size // 2),
        max_overflow=0,
        pool_timeout=30,
        pool_reset_on_return="rollback",
        connect_args=args | {"prepare_threshold": None if pooled else 2},
        json_serializer=lambda value: orjson.dumps(value).decode(),
        json_deserializer=orjson.loads,
    )
    pool: LangGraphPool = AsyncConnectionPool(
        psycopg_url(url),
        min_size=1,
        max_size=max(2, pool_size - pool_size // 2),
        open=False,
        timeout=30,
        kwargs=args | {"autocommit": True, "prepare_threshold": None if pooled else 0, "row_factory": dict_row},
    )
    notifier = Notifier(pool)
    try:
        await pool.open(wait=True, timeout=30)
        yield Database(url, engine, async_sessionmaker(engine, expire_on_commit=False, autoflush=False), pool, notifier)
    finally:
        await notifier.flush()
        await pool.close()
        await engine.dispose()
