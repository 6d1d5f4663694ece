"""The event log: same bytes for every reader, on every replica, from every position; nothing lost, nobody waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import select, text
from uuid_utils.compat import uuid7

from app.db.engine import Database, after_commit, open_database
from app.db.listen import Listener
from app.runs import queue
from app.runs.models import TERMINAL, Run, RunKind
from app.runs.queue import Claimant
from app.streaming import channel
from app.streaming.log import EventLog, Frame, RunWriter
from app.threads.models import Thread


@asynccontextmanager
async def replica(database: Database, *, listening: bool = True, **options: float) -> AsyncIterator[EventLog]:
    """An event log with tasks of its own, as another process would have."""
    listener = Listener(database.url)
    events = EventLog(database, listener, **options)

    async def ended(run_id: UUID) -> bool:
        async with database.transaction() as tx:
            return (await tx.scalar(select(Run.status).where(Run.id == run_id))) in TERMINAL

    events.ended = ended
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


@pytest.fixture
async def run(database: Database) -> Run:
    return await make_run(database)


async def make_run(database: Database) -> Run:
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
    async with database.transaction() as tx:
        tx.add(thread)
        await tx.flush()
        return await queue.insert(tx, new, Claimant("me", 30.0))


async def collect(frames: AsyncIterator[list[Frame]], *, until: int | None = None) -> list[Frame]:
    """Everything a reader sees, or the first so many frames."""
    seen: list[Frame] = []
    async with asyncio.timeout(20):
        async for batch in frames:
            seen += batch
            if until is not None and len(seen) >= until:
                break
    return seen


async def end(database: Database, run: Run, writer: RunWriter, *extra: tuple[str, bytes]) -> None:
    await writer.settle()
    async with database.transaction() as tx:
        await tx.execute(text("UPDATE runs SET status = 'success' WHERE id = :id"), {"id": run.id})
        after_commit(tx, await writer.finish(tx, [*extra, ("end", b"{}")]))


async def eventually(check: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(10):
        while not await check():
            await asyncio.sleep(0.01)


def sse(frames: list[Frame]) -> bytes:
    return b"".join(f.sse for f in frames)


async def test_all_readers_see_the_same_bytes_on_every_replica(database: Database, run: Run) -> None:
    async with replica(database) as here, replica(database) as there:
        readers = [asyncio.create_task(collect(log.subscribe(run.id, after=None))) for log in (here, here, there)]
        writer = here.open(run.id, 1)
        for i in range(50):
            writer.publish("custom", b"%d" % i)
            if i % 10 == 0:
                await asyncio.sleep(0.03)
        await end(database, run, writer, ("values", b"{}"))
        first, second, remote = [sse(frames) for frames in await asyncio.gather(*readers)]
        assert first == second == remote
        assert first.startswith(b"event: custom\r\ndata: 0\r\nid: 1-1\r\n\r\nevent: custom\r\ndata: 1\r\nid: 1-2\r\n\r\n")
        assert first.endswith(b"event: values\r\ndata: {}\r\nid: 1-51\r\n\r\nevent: end\r\ndata: {}\r\nid: 1-52\r\n\r\n")
        late = sse(await collect(there.subscribe(run.id, after=None)))
        assert late == first


async def test_a_reader_that_comes_back_gets_exactly_the_rest(database: Database, run: Run) -> None:
    async with replica(database) as here, replica(database) as there:
        writer = here.open(run.id, 1)
        for i in range(9):
            writer.publish("custom", b"%d" % i)
        whole = [f async for b in _ended(database, run, writer, here) for f in b]
        for log in (here, there):
            for i, frame in enumerate(whole[:-1]):
                assert await collect(log.subscribe(run.id, after=frame.id)) == whole[i + 1 :]


async def _ended(database: Database, run: Run, writer: RunWriter, log: EventLog) -> AsyncIterator[list[Frame]]:
    reader = log.subscribe(run.id, after=None)
    await end(database, run, writer)
    async for batch in reader:
        yield batch


async def test_readers_of_a_live_run_do_not_touch_the_database(run: Run, database: Database) -> None:
    """The whole stream comes from memory, although the table cannot be read."""
    async with replica(database) as log:
        writer = log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        writer.publish("custom", b"1")
        async with database.pool.connection() as connection, connection.transaction():
            await connection.execute("LOCK TABLE run_events IN ACCESS EXCLUSIVE MODE")
            assert len(await collect(reader, until=1)) == 1
            writer.publish("custom", b"2")
            assert len(await collect(reader, until=1)) == 1


async def test_a_slow_reader_holds_up_nobody_and_misses_nothing(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MEMORY", 10_000)
    async with replica(database) as log:
        writer = log.open(run.id, 1)
        slow = log.subscribe(run.id, after=None)
        first = await _first(slow, writer)
        quick = asyncio.create_task(collect(log.subscribe(run.id, after=None)))
        for i in range(3000):
            writer.publish("custom", b'"%0100d"' % i)
            if i % 500 == 0:
                await asyncio.sleep(0.03)

        async def trimmed() -> bool:
            held = log._topics[run.id].channel
            return held is not None and held.dropped > 2000

        await eventually(trimmed)
        await end(database, run, writer)
        seen = await quick
        assert [f.seq for f in seen] == list(range(1, 3003))
        assert sse(first + await collect(slow)) == sse(seen)


async def _first(reader: AsyncIterator[list[Frame]], writer: RunWriter) -> list[Frame]:
    writer.publish("custom", b"0")
    return await collect(reader, until=1)


async def test_a_stale_epoch_writes_nothing(database: Database, run: Run) -> None:
    async with replica(database) as log:
        zombie = log.open(run.id, 1)
        async with database.transaction() as tx:
            await tx.execute(text("UPDATE runs SET epoch = 2 WHERE id = :id"), {"id": run.id})
        zombie.publish("custom", b'"zombie"')
        owner = log.open(run.id, 2)
        owner.publish("custom", b'"owner"')
        await end(database, run, owner)
    async with replica(database) as log:
        assert [(f.id, f.event) for f in await collect(log.subscribe(run.id, after=None))] == [
            ((2, 1), "custom"),
            ((2, 2), "end"),
        ]


async def test_a_reader_goes_on_across_a_takeover(database: Database, run: Run) -> None:
    async with replica(database) as first, replica(database) as second, replica(database) as reading:
        remote = asyncio.create_task(collect(reading.subscribe(run.id, after=None)))
        local = asyncio.create_task(collect(second.subscribe(run.id, after=None)))
        before = first.open(run.id, 1)
        before.publish("custom", b"1")

        async def flushed() -> bool:
            return bool(await reading.read_after(run.id, (-1, -1)))

        await eventually(flushed)
        async with database.transaction() as tx:
            await tx.execute(text("UPDATE runs SET epoch = 2 WHERE id = :id"), {"id": run.id})
        before.abandon()
        after = second.open(run.id, 2)
        after.publish("custom", b"2")
        await end(database, run, after)
        for frames in await asyncio.gather(remote, local):
            assert [f.id for f in frames] == [(1, 1), (2, 1), (2, 2)]


async def test_without_any_notification_the_stream_still_ends(database: Database, run: Run) -> None:
    async with replica(database) as here, replica(database, listening=False, heartbeat_seconds=0.1) as deaf:
        reader = asyncio.create_task(collect(deaf.subscribe(run.id, after=None)))
        writer = here.open(run.id, 1)
        for i in range(5):
            writer.publish("custom", b"%d" % i)
        await end(database, run, writer)
        assert len(await reader) == 6


async def test_a_database_that_throws_its_clients_out_loses_no_event(fresh_database_url: str) -> None:
    async with open_database(fresh_database_url) as database, replica(database, heartbeat_seconds=0.1) as log:
        run = await make_run(database)
        writer = log.open(run.id, 1)
        async with await psycopg.AsyncConnection.connect(fresh_database_url, autocommit=True) as admin:
            for i in range(20):
                writer.publish("custom", b"%d" % i)
                await asyncio.sleep(0.01)
                await admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
        await database.engine.dispose()
        await end(database, run, writer)
        seen = await collect(log.subscribe(run.id, after=None))
        assert [f.seq for f in seen] == list(range(1, 22))


async def test_heartbeats_come_while_nothing_happens(database: Database, run: Run) -> None:
    async with replica(database, heartbeat_seconds=0.05) as log:
        log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        async with asyncio.timeout(5):
            assert [await anext(reader), await anext(reader)] == [[], []]


async def test_live_only_starts_now_and_modes_filter(database: Database, run: Run) -> None:
    async with replica(database) as log:
        writer = log.open(run.id, 1)
        writer.publish("values", b"1")
        live = log.subscribe(run.id, after=None, live_only=True)
        messages = log.subscribe(run.id, after=None, modes=frozenset({"messages-tuple"}))
        writer.publish("messages|child:1", b"2")
        writer.publish("messages/partial", b"3")
        await end(database, run, writer, ("error", b"{}"))
        assert [f.event for f in await collect(live)] == ["messages|child:1", "messages/partial", "error", "end"]
        assert [f.event for f in await collect(messages)] == ["messages|child:1", "messages/partial", "error", "end"]


async def test_a_run_that_ended_without_running_ends_its_streams(database: Database, run: Run) -> None:
    async with replica(database) as here, replica(database) as there:
        readers = [asyncio.create_task(collect(log.subscribe(run.id, after=None))) for log in (here, there)]
        await asyncio.sleep(0)
        async with database.transaction() as tx:
            await here.close(tx, run.id, 0)
        for frames in await asyncio.gather(*readers):
            assert [(f.id, f.event) for f in frames] == [((0, 1), "end")]


async def test_a_finish_that_did_not_commit_can_be_tried_again(database: Database, run: Run) -> None:
    async with replica(database) as log:
        writer = log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        writer.publish("custom", b"1")
        await writer.settle()
        async with database.engine.connect() as connection, database.sessions(bind=connection) as tx:
            await writer.finish(tx, [("end", b"{}")])
            await tx.rollback()
        await end(database, run, writer)
        assert [f.id for f in await collect(reader)] == [(1, 1), (1, 2)]


async def test_stopping_ends_every_stream(database: Database, run: Run) -> None:
    async with replica(database) as log:
        log.open(run.id, 1)
        readers = [asyncio.create_task(collect(log.subscribe(run.id, after=None))) for _ in range(10)]
        await asyncio.sleep(0)
        log.shut()
        assert await asyncio.gather(*readers) == [[]] * 10


async def test_topics_of_the_past_are_forgotten(database: Database, run: Run) -> None:
    async with replica(database) as log:
        writer = log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        await end(database, run, writer)
        await collect(reader)
        await collect(log.subscribe(run.id, after=None))
        assert log._topics == {}
