"""The pools of one process and the only place that commits.

SQLAlchemy serves our tables; a psycopg pool (autocommit, as LangGraph's saver and store need it) serves LangGraph and the
event log. Both speak psycopg 3 to the same database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

LangGraphPool = AsyncConnectionPool[AsyncConnection[DictRow]]

AFTER_COMMIT = "after_commit"

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


@dataclass(slots=True)
class Database:
    """The database as one process sees it."""

    url: str
    engine: AsyncEngine
    sessions: async_sessionmaker[AsyncSession]
    pool: LangGraphPool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A unit of work: commits when the block ends, rolls back when it raises. Keep it short."""
        async with self.sessions() as session:
            async with session.begin():
                yield session
            for action in session.info.pop(AFTER_COMMIT, ()):
                action()

    def heal(self) -> None:
        """Replace connections that died, so that nobody else has to find them. Called when the listener has reconnected."""
        task = asyncio.ensure_future(self.pool.check())
        task.add_done_callback(lambda t: t.cancelled() or t.exception())


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
async def open_database(url: str, *, pool_size: int = 20, name: str = "keyturn") -> AsyncIterator[Database]:
    """Open both pools on `url` and close them again. `name` shows in `pg_stat_activity`."""
    args = CONNECT_ARGS | {"application_name": name}
    engine = create_async_engine(
        sqlalchemy_url(url),
        pool_size=max(2, pool_size // 2),
        max_overflow=0,
        pool_timeout=30,
        pool_reset_on_return="rollback",
        connect_args=args | {"prepare_threshold": 2},
        json_serializer=lambda value: orjson.dumps(value).decode(),
        json_deserializer=orjson.loads,
    )
    pool: LangGraphPool = AsyncConnectionPool(
        psycopg_url(url),
        min_size=1,
        max_size=max(2, pool_size - pool_size // 2),
        open=False,
        timeout=30,
        kwargs=args | {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
    )
    try:
        await pool.open(wait=True, timeout=30)
        yield Database(url, engine, async_sessionmaker(engine, expire_on_commit=False, autoflush=False), pool)
    finally:
        await pool.close()
        await engine.dispose()
