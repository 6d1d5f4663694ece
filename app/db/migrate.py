"""Brings a database to the schema of this version: Alembic, LangGraph's saver and store, Procrastinate, in this order.

All under one advisory lock that is polled on a session of its own. A blocking wait would hang: LangGraph creates indexes
concurrently, which waits for every session that waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import procrastinate
import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.store.postgres.aio import AsyncPostgresStore
from psycopg.rows import dict_row
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import CONNECT_ARGS, psycopg_url

LOCK_KEY = 0x4B657974  # "Keyt"
MIGRATIONS = Path(__file__).parents[2] / "migrations"

Progress = Callable[[str], None]


def _alembic(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["url"] = url
    return config


@asynccontextmanager
async def _lock(url: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
    """Hold the migration lock. Others wait their turn by asking again."""
    async with await psycopg.AsyncConnection.connect(psycopg_url(url), autocommit=True, **CONNECT_ARGS) as connection:
        delay = 0.05
        while True:
            row = await (await connection.execute("SELECT pg_try_advisory_lock(%s)", [LOCK_KEY])).fetchone()
            if row and row[0]:
                break
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 1.0)
        yield connection


async def migrate(url: str, progress: Progress | None = None) -> None:
    """Apply everything that is missing. Safe to run from any number of processes at once, and again at any time."""
    say = progress or (lambda _: None)
    async with _lock(url) as connection:
        say("tables")
        await asyncio.to_thread(command.upgrade, _alembic(url), "head")
        async with await psycopg.AsyncConnection.connect(
            psycopg_url(url), autocommit=True, prepare_threshold=0, row_factory=dict_row, **CONNECT_ARGS
        ) as session:
            say("checkpoints")
            await AsyncPostgresSaver(session).setup()
            say("memories")
            await AsyncPostgresStore(session).setup()
        say("queue")
        if not await _exists(connection, "procrastinate_jobs"):
            connector = procrastinate.PsycopgConnector(conninfo=psycopg_url(url), min_size=1, max_size=1)
            async with procrastinate.App(connector=connector).open_async() as app:
                await app.schema_manager.apply_schema_async()


async def pending(url: str) -> bool:
    """Whether this version needs a schema that the database does not have yet."""
    head, _ = await asyncio.to_thread(_known)
    async with await psycopg.AsyncConnection.connect(psycopg_url(url), autocommit=True, **CONNECT_ARGS) as connection:
        wanted = {
            "alembic_version": ("version_num", head),
            "checkpoint_migrations": ("max(v)", len(AsyncPostgresSaver.MIGRATIONS) - 1),
            "store_migrations": ("max(v)", len(AsyncPostgresStore.MIGRATIONS) - 1),
        }
        for table, (column, value) in wanted.items():
            if not await _exists(connection, table):
                return True
            row = await (await connection.execute(f"SELECT {column} FROM {table}")).fetchone()
            if row is None or row[0] != value:
                return True
        return not await _exists(connection, "procrastinate_jobs")


@cache
def _known() -> tuple[str | None, frozenset[str]]:
    """The newest revision of this version, and all that came before."""
    script = ScriptDirectory.from_config(_alembic(""))
    head = script.get_current_head()
    return head, frozenset(revision.revision for revision in script.walk_revisions()) - {head}


async def is_current(tx: AsyncSession) -> bool:
    """Whether our tables are of this version, or of a newer one that another process has migrated to. A cheap look."""
    if not (await tx.execute(text("SELECT to_regclass('public.alembic_version') IS NOT NULL"))).scalar_one():
        return False
    found = set((await tx.execute(text("SELECT version_num FROM alembic_version"))).scalars())
    return bool(found) and not found & _known()[1]


async def _exists(connection: psycopg.AsyncConnection[tuple[Any, ...]], table: str) -> bool:
    row = await (await connection.execute("SELECT to_regclass(%s) IS NOT NULL", [f"public.{table}"])).fetchone()
    return bool(row and row[0])
