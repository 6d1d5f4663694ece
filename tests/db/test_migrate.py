"""Migrations: from nothing to this version's schema, by any number of processes at once, and no drift."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from alembic import command
from alembic.config import Config

from app.db.engine import psycopg_url
from app.db.migrate import LOCK_KEY, MIGRATIONS, migrate, pending


async def test_five_at_once_on_an_empty_database(empty_database_url: str) -> None:
    assert await pending(empty_database_url)
    steps: list[str] = []
    await asyncio.gather(*(migrate(empty_database_url, steps.append) for _ in range(5)))
    assert not await pending(empty_database_url)
    assert steps == ["tables", "checkpoints", "memories", "queue"] * 5, "one after the other"


async def test_a_migration_that_was_cut_off_is_finished_by_the_next(empty_database_url: str) -> None:
    def cut(step: str) -> None:
        if step == "queue":
            raise KeyError(step)

    try:
        await migrate(empty_database_url, cut)
    except KeyError:
        assert await pending(empty_database_url)
    await migrate(empty_database_url)
    assert not await pending(empty_database_url)


async def test_a_waiting_migration_holds_no_one_up(empty_database_url: str) -> None:
    """The lock is asked for again and again, never waited for: indexes built concurrently wait for sessions that wait."""
    async with await psycopg.AsyncConnection.connect(psycopg_url(empty_database_url), autocommit=True) as other:
        await other.execute(f"SELECT pg_advisory_lock({LOCK_KEY})")  # somebody else migrates
        task = asyncio.create_task(migrate(empty_database_url))
        activity = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        async with asyncio.timeout(30):
            while (await (await other.execute(activity)).fetchone()) == (0,):
                await asyncio.sleep(0.01)
        waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        assert await (await other.execute(waits)).fetchone() is None
        assert not task.done()
        await other.execute(f"SELECT pg_advisory_unlock({LOCK_KEY})")
        await task
    assert not await pending(empty_database_url)


@pytest.mark.filterwarnings("ignore:Did not recognize type 'xid8'")
async def test_models_and_migrations_agree(fresh_database_url: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = fresh_database_url
    await asyncio.to_thread(command.check, config)


async def test_down_and_up_again(fresh_database_url: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = fresh_database_url
    await asyncio.to_thread(command.downgrade, config, "base")
    assert await pending(fresh_database_url)
    await migrate(fresh_database_url)
    assert not await pending(fresh_database_url)
