"""The short way to start and end a run: taken only when nothing else can be going on."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
import pytest_asyncio
from sqlalchemy import text
from uuid_utils.compat import uuid7

from app.assistants.models import Assistant
from app.db.engine import Database
from app.runs import queue
from app.runs.models import CancelAction, Run, RunKind, RunStatus, StopReason
from app.runs.outcome import Outcome
from app.runs.queue import Claimant
from app.runs.shortcut import Shortcut, Started
from app.streaming.channel import Frame
from app.threads.models import Thread

ME = Claimant("me", 30.0)
DONE = Outcome(RunStatus.success, StopReason.finished, values={"messages": ["hi"]})
END = [Frame.make(1, 1, "end", b"{}")]


@pytest_asyncio.fixture
async def shortcut(database: Database) -> Shortcut:
    return Shortcut(database)


async def make(database: Database, **of_thread: object) -> Run:
    """A run on a new thread, not stored."""
    assistant = Assistant(
        id=uuid7(), tenant_id="default", graph_id="react", name="a", config={}, context={}, metadata_={}, version=1
    )
    thread = Thread(**{"id": uuid7(), "tenant_id": "default", "metadata_": {"kept": 1}, **of_thread})
    async with database.transaction() as tx:
        tx.add_all([assistant, thread])
    return Run(
        id=uuid7(),
        tenant_id="default",
        thread_id=thread.id,
        assistant_id=assistant.id,
        assistant_version=1,
        graph_id="react",
        subject="local",
        kind=RunKind.input,
        kwargs={"input": {}},
        metadata_={},
        multitask_strategy="enqueue",
    )


async def one(database: Database, query: str, id_: UUID) -> object:
    async with database.transaction() as tx:
        return (await tx.execute(text(query), {"id": id_})).one()


async def change(database: Database, query: str, id_: UUID) -> None:
    async with database.transaction() as tx:
        await tx.execute(text(query), {"id": id_})


async def started(shortcut: Shortcut, run: Run) -> Started:
    found = await shortcut.start(run, ME, b'{"ran": true}')
    assert found is not None
    return found


async def test_a_run_starts_claimed_and_ends_with_its_thread_and_its_last_events(
    shortcut: Shortcut, database: Database
) -> None:
    run = await make(database)
    row_version = (await started(shortcut, run)).row_version
    assert run.created_at is not None
    assert (run.status, run.epoch, run.owner) == ("running", 1, "me")
    thread = await one(database, "SELECT status, metadata FROM threads WHERE id = :id", run.thread_id)
    assert thread == ("busy", {"kept": 1, "ran": True})
    assert await shortcut.end(run, row_version, DONE, END, private=frozenset())
    ended = await one(database, "SELECT status, stop_reason, owner FROM runs WHERE id = :id", run.id)
    assert ended == ("success", "finished", None)
    settled = await one(database, 'SELECT status, "values", graph_id FROM threads WHERE id = :id', run.thread_id)
    assert settled == ("idle", {"messages": ["hi"]}, "react")
    assert await one(database, "SELECT epoch, seq, event FROM run_events WHERE run_id = :id", run.id) == (1, 1, "end")


@pytest.mark.parametrize("status", ["busy", "interrupted", "error"])
async def test_it_starts_nothing_on_a_thread_that_is_not_idle(shortcut: Shortcut, database: Database, status: str) -> None:
    assert await shortcut.start(await make(database, status=status), ME, b"{}") is None


async def test_it_starts_nothing_on_the_thread_of_another_tenant(shortcut: Shortcut, database: Database) -> None:
    assert await shortcut.start(await make(database, tenant_id="other"), ME, b"{}") is None


async def test_it_starts_nothing_where_a_run_waits(shortcut: Shortcut, database: Database) -> None:
    run = await make(database)
    async with database.transaction() as tx:
        await queue.insert(tx, await make(database), None)
        waiting = await make(database)
        waiting.thread_id = run.thread_id
        await queue.insert(tx, waiting, None)
    assert await shortcut.start(run, ME, b"{}") is None


@pytest.mark.parametrize("change_", ["version = 2", "deleted_at = now()", "tenant_id = 'other'"])
async def test_it_starts_nothing_with_an_assistant_that_has_changed(
    shortcut: Shortcut, database: Database, change_: str
) -> None:
    run = await make(database)
    await change(database, f"UPDATE assistants SET {change_} WHERE id = :id", run.assistant_id)
    assert await shortcut.start(run, ME, b"{}") is None


async def test_it_starts_nothing_on_what_it_saw_before_it_had_to_wait(shortcut: Shortcut, database: Database) -> None:
    """Somebody writes the thread's state at that moment: the statement would not see the checkpoint that this makes."""
    run = await make(database)
    async with database.transaction() as tx:
        await queue.lock_thread(tx, run.thread_id)
        starting = asyncio.create_task(shortcut.start(run, ME, b"{}"))
        async with asyncio.timeout(10), database.pool.connection() as other:
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%seen AS MATERIALIZED%%'"
            while await (await other.execute(waits)).fetchone() is None:
                await asyncio.sleep(0.01)
        await tx.execute(text("UPDATE threads SET state_updated_at = now() WHERE id = :id"), {"id": run.thread_id})
    assert await starting is None


async def test_a_thread_that_was_given_something_else_to_do_is_not_ended_shortly(
    shortcut: Shortcut, database: Database
) -> None:
    """Whoever queues a run changes the thread's row. The run that is ending must then look for what comes next."""
    run = await make(database)
    row_version = (await started(shortcut, run)).row_version
    await change(database, "UPDATE threads SET updated_at = now() WHERE id = :id", run.thread_id)
    assert not await shortcut.end(run, row_version, DONE, END, private=frozenset())
    assert await one(database, "SELECT status FROM runs WHERE id = :id", run.id) == ("running",)
    assert await one(database, "SELECT status FROM threads WHERE id = :id", run.thread_id) == ("busy",)
    assert await one(database, "SELECT count(*) FROM run_events WHERE run_id = :id", run.id) == (0,)


@pytest.mark.parametrize("change_", ["epoch = 2", "cancel = 'interrupt'", "status = 'error'"])
async def test_a_run_that_was_taken_over_cancelled_or_ended_is_not_ended_shortly(
    shortcut: Shortcut, database: Database, change_: str
) -> None:
    run = await make(database)
    row_version = (await started(shortcut, run)).row_version
    await change(database, f"UPDATE runs SET {change_} WHERE id = :id", run.id)
    assert not await shortcut.end(run, row_version, DONE, END, private=frozenset())
    assert await one(database, "SELECT status FROM threads WHERE id = :id", run.thread_id) == ("busy",)


async def test_a_lock_alone_does_not_change_the_threads_row(shortcut: Shortcut, database: Database) -> None:
    run = await make(database)
    row_version = (await started(shortcut, run)).row_version
    async with database.transaction() as tx:
        thread = await queue.lock_thread(tx, run.thread_id)
        assert thread is not None
        await queue.cancel(tx, thread, [], CancelAction.interrupt)
    assert await shortcut.end(run, row_version, DONE, END, private=frozenset())
