"""Event logs as several processes would have them, on either store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from redisserver import RedisServer
from sqlalchemy import text
from uuid_utils.compat import uuid7

from app.db.engine import Database, after_commit
from app.db.listen import Listener
from app.runs import queue
from app.runs.endings import RunEndings
from app.runs.models import Run, RunKind
from app.runs.queue import Claimant
from app.settings import Settings
from app.streaming.channel import Frame
from app.streaming.log import EventLog
from app.streaming.stores import open_event_store
from app.streaming.writer import RunWriter
from app.threads.models import Thread


@dataclass(slots=True)
class Place:
    """Where events are kept: in the database, or in Redis."""

    database: Database
    redis: RedisServer | None = None

    @asynccontextmanager
    async def replica(self, *, listening: bool = True, **options: float) -> AsyncIterator[EventLog]:
        """An event log with tasks of its own, as another process would have."""
        settings = Settings(redis_url=self.redis.url if self.redis else None)
        listener = Listener(self.database.url)
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_event_store(settings, self.database, listener))
            events = EventLog(store, RunEndings(self.database), **options)
            tasks = [asyncio.create_task(events.run())]
            if listening:
                tasks.append(asyncio.create_task(listener.run()))
                await listener.connected.wait()
            try:
                yield events
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def unreadable(self) -> AsyncIterator[None]:
        """While nobody can read or write events."""
        if self.redis is not None:
            self.redis.freeze()
            try:
                yield
            finally:
                self.redis.thaw()
        else:
            async with self.database.pool.connection() as connection, connection.transaction():
                await connection.execute("LOCK TABLE run_events IN ACCESS EXCLUSIVE MODE")
                yield

    @asynccontextmanager
    async def hostile(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Gives something that throws out all clients."""
        if self.redis is not None:
            with self.redis.client() as client:

                async def throw_out() -> None:
                    client.client_kill_filter(_type="normal")

                yield throw_out
        else:
            async with await psycopg.AsyncConnection.connect(self.database.url, autocommit=True) as admin:

                async def throw_out() -> None:
                    await admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )

                yield throw_out

    async def lose(self) -> None:
        """Whatever was stored is gone."""
        if self.redis is not None:
            with self.redis.client() as client:
                client.flushall()
        else:
            async with self.database.pool.connection() as connection:
                await connection.execute("DELETE FROM run_events")

    async def run(self) -> Run:
        """A new run, claimed by nobody whom these tests know."""
        thread = Thread(id=uuid7(), tenant_id="default", metadata_={})
        new = Run(
            id=uuid7(),
            tenant_id="default",
            thread_id=thread.id,
            assistant_id=uuid7(),
            assistant_version=1,
            graph_id="react",
            subject="local",
            kind=RunKind.input,
            kwargs={},
            metadata_={},
            multitask_strategy="enqueue",
        )
        async with self.database.transaction() as tx:
            tx.add(thread)
            await tx.flush()
            return await queue.insert(tx, new, Claimant("me", 30.0))

    async def take_over(self, run: Run, epoch: int = 2) -> None:
        """Somebody else claims the run."""
        async with self.database.transaction() as tx:
            await tx.execute(text("UPDATE runs SET epoch = :epoch WHERE id = :id"), {"id": run.id, "epoch": epoch})

    async def end(self, run: Run, writer: RunWriter, *extra: tuple[str, bytes]) -> None:
        """End the run, with these events and `end`."""
        await writer.settle()
        async with self.database.transaction() as tx:
            await tx.execute(text("UPDATE runs SET status = 'success', finished_at = now() WHERE id = :id"), {"id": run.id})
            after_commit(tx, await writer.finish(tx, [*extra, ("end", b"{}")]))


async def collect(frames: AsyncIterator[list[Frame]], *, until: int | None = None) -> list[Frame]:
    """Everything a reader sees, or the first so many frames."""
    seen: list[Frame] = []
    async with asyncio.timeout(20):
        async for batch in frames:
            seen += batch
            if until is not None and len(seen) >= until:
                break
    return seen


async def stored(events: EventLog, run_id: UUID, count: int = 1) -> None:
    """Wait until so many frames of a run can be read again."""

    async def there() -> bool:
        return len(await events.store.read(run_id, (-1, -1), 10_000)) >= count

    await eventually(there)


async def eventually(check: Callable[[], Awaitable[Any]]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(10):
        while not await check():
            await asyncio.sleep(0.01)


def sse(frames: list[Frame]) -> bytes:
    """As it goes over the wire."""
    return b"".join(f.sse for f in frames)
