"""Processes that die or freeze at the worst moments, and the one beside them that goes on with their runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest_asyncio
from processes import Server, Servers

PROJECT = Path(__file__).parent / "crash" / "langgraph.json"
LEASE_SECONDS = 2
HEARTBEAT = ": heartbeat\r\n\r\n"
WATCH = """
CREATE TABLE crash_effects (name text);
CREATE TABLE crash_go (name text);
CREATE TABLE crash_ends (run_id uuid);
CREATE FUNCTION crash_watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.status IN ('success', 'error', 'timeout', 'interrupted') AND NEW.status <> OLD.status THEN
        INSERT INTO crash_ends VALUES (NEW.id);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER crash_watch AFTER UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION crash_watch();
"""


@dataclass
class Pair:
    """Two servers on one database. The first takes the runs, the second is there to take them over."""

    first: Server
    second: Server
    here: httpx.AsyncClient
    there: httpx.AsyncClient
    db: psycopg.AsyncConnection[Any]

    async def rows(self, query: str, *params: Any) -> list[Any]:
        return await (await self.db.execute(query, params)).fetchall()

    async def until(self, query: str, *params: Any) -> None:
        """Wait until a query finds something."""
        async with asyncio.timeout(30):
            while not await self.rows(query, *params):
                await asyncio.sleep(0.02)

    async def thread(self) -> str:
        made: str = (await self.here.post("/threads", json={})).json()["thread_id"]
        return made

    async def run(self, thread: str, said: str, assistant: str = "steps") -> str:
        """Start a run on the first server."""
        body = {"assistant_id": assistant, "input": {"messages": [{"role": "user", "content": said}]}}
        made = await self.here.post(f"/threads/{thread}/runs", json=body)
        assert made.status_code == 200, made.text
        return str(made.json()["run_id"])

    async def let_go(self, name: str) -> None:
        await self.db.execute("INSERT INTO crash_go VALUES (%s)", [name])

    async def ended(self, thread: str, run: str) -> list[str]:
        """What was said on the thread when the run has ended, well and once."""
        async with asyncio.timeout(40):
            await self.there.get(f"/threads/{thread}/runs/{run}/join", timeout=40)
        assert (await self.there.get(f"/threads/{thread}/runs/{run}")).json()["status"] == "success"
        assert len(await self.rows("SELECT 1 FROM crash_ends WHERE run_id = %s", run)) == 1
        state = (await self.there.get(f"/threads/{thread}/state")).json()
        return [m["content"] for m in state["values"]["messages"]]

    @asynccontextmanager
    async def saving_nothing(self, table: str) -> AsyncIterator[None]:
        """Nobody can write to one of the saver's tables."""
        async with await psycopg.AsyncConnection.connect(self.first.database_url) as locker:
            await locker.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
            yield
            await locker.rollback()


@pytest_asyncio.fixture
async def pair(servers: Servers, fresh_database_url: str) -> AsyncIterator[Pair]:
    async with await psycopg.AsyncConnection.connect(fresh_database_url, autocommit=True) as db:
        await db.execute(WATCH)
        options = {"examples": 0, "config": PROJECT, "lease_seconds": LEASE_SECONDS, "heartbeat_seconds": 0.5}
        env = {"CRASH_URL": fresh_database_url}
        first, second = await asyncio.gather(*(servers.start(fresh_database_url, environment=env, **options) for _ in range(2)))
        async with (
            httpx.AsyncClient(base_url=first.url, timeout=10) as here,
            httpx.AsyncClient(base_url=second.url, timeout=10) as there,
        ):
            yield Pair(first, second, here, there, db)
        for server in (first, second):
            await server.stop(signal.SIGKILL)


async def test_kill_in_a_superstep(pair: Pair) -> None:
    thread = await pair.thread()
    run = await pair.run(thread, "hi")
    await pair.until("SELECT 1 FROM crash_effects WHERE name = 'second'")
    await pair.first.stop(signal.SIGKILL)
    await pair.until("SELECT 1 FROM runs WHERE id = %s AND epoch = 2", run)
    await pair.let_go("second")
    assert await pair.ended(thread, run) == ["hi", "first hi", "second"]
    assert len(await pair.rows("SELECT 1 FROM crash_effects WHERE name = 'first hi'")) == 1, "its step was saved"


async def test_kill_in_a_tool(pair: Pair) -> None:
    script = {
        "rules": [
            {"if": "go", "tool_calls": [{"name": "work", "args": {"name": "a"}}, {"name": "work", "args": {"name": "b"}}]},
            {"after_tool": "work", "reply": "done"},
        ]
    }
    agent = {"model": {"provider": "scripted", "params": script}, "tools": ["work"]}
    made = await pair.here.post("/assistants", json={"graph_id": "react", "config": {"configurable": agent}})
    thread = await pair.thread()
    run = await pair.run(thread, "go", made.json()["assistant_id"])
    await pair.let_go("work a")
    await pair.until("SELECT 1 FROM crash_effects WHERE name = 'work b'")
    await pair.first.stop(signal.SIGKILL)
    await pair.let_go("work b")
    said = await pair.ended(thread, run)
    assert (said[0], sorted(said[2:4]), said[4:]) == ("go", ["worked a", "worked b"], ["done"])


async def test_kill_on_the_second_turn_before_its_first_checkpoint(pair: Pair) -> None:
    thread = await pair.thread()
    await pair.let_go("second")
    await pair.ended(thread, await pair.run(thread, "one"))
    async with pair.saving_nothing("checkpoints"):
        run = await pair.run(thread, "two")
        await pair.until("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%INTO checkpoint%%'")
        await pair.first.stop(signal.SIGKILL)
    assert await pair.ended(thread, run) == ["one", "first one", "second", "two", "first two", "second"]


async def asked(pair: Pair) -> tuple[str, dict[str, Any]]:
    """A thread that asks, and its question."""
    thread = await pair.thread()
    await pair.run(thread, "ask")
    await pair.until("SELECT 1 FROM inbox_items WHERE status = 'pending'")
    [item] = (await pair.here.get("/inbox", params={"thread_id": thread})).json()["items"]
    return thread, item


async def answered(pair: Pair, item: dict[str, Any]) -> str:
    done = await pair.here.post(f"/inbox/{item['id']}/response", json={"type": "response", "args": "yes"})
    assert done.status_code == 202, done.text
    return str(done.json()["run_id"])


async def settled(pair: Pair, item: dict[str, Any]) -> None:
    await pair.until("SELECT 1 FROM inbox_items WHERE id = %s AND status = 'settled'", item["id"])
    decided = await pair.rows("SELECT 1 FROM inbox_decisions WHERE item_id = %s AND event = 'decided'", item["id"])
    assert len(decided) == 1


async def test_kill_on_a_resume_before_the_answer_is_stored(pair: Pair) -> None:
    thread, item = await asked(pair)
    await pair.let_go("second")
    async with pair.saving_nothing("checkpoint_writes"):
        run = await answered(pair, item)
        await pair.until("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%checkpoint_writes%%'")
        await pair.first.stop(signal.SIGKILL)
    assert await pair.ended(thread, run) == ["ask", "answered yes", "second"]
    await settled(pair, item)


async def test_kill_on_a_resume_after_the_answer_is_stored(pair: Pair) -> None:
    thread, item = await asked(pair)
    run = await answered(pair, item)
    await pair.until("SELECT 1 FROM crash_effects WHERE name = 'second'")
    await pair.first.stop(signal.SIGKILL)
    await pair.let_go("second")
    assert await pair.ended(thread, run) == ["ask", "answered yes", "second"]
    await settled(pair, item)


async def test_a_process_that_was_frozen_beyond_its_lease_writes_nothing_more(pair: Pair) -> None:
    thread = await pair.thread()
    run = await pair.run(thread, "hi")
    await pair.until("SELECT 1 FROM crash_effects WHERE name = 'second'")
    assert pair.first.process is not None
    pair.first.process.send_signal(signal.SIGSTOP)
    await pair.until("SELECT 1 FROM runs WHERE id = %s AND epoch = 2", run)
    await pair.until("SELECT 1 FROM crash_effects WHERE name = 'second' OFFSET 1")
    await pair.let_go("second")
    said = await pair.ended(thread, run)
    before = await pair.rows("SELECT count(*) FROM checkpoints WHERE thread_id = %s", thread)
    pair.first.process.send_signal(signal.SIGCONT)
    # It wakes up in the middle of the step that its successor has ended, and ends it too.
    async with asyncio.timeout(30):
        while "run_given_back" not in pair.first.tail(100) and "run_not_ours" not in pair.first.tail(100):
            await asyncio.sleep(0.05)
    assert await pair.ended(thread, run) == said == ["hi", "first hi", "second"]
    assert await pair.rows("SELECT count(*) FROM checkpoints WHERE thread_id = %s", thread) == before
    ends = "SELECT epoch FROM run_events WHERE run_id = %s AND event = 'end'"
    assert await pair.rows(ends, run) == [(2,)]


async def test_a_stream_of_the_other_process_needs_no_notification(pair: Pair) -> None:
    """Every session that listens is cut off again and again: what they would have told is looked up."""
    thread = await pair.thread()
    cutting = asyncio.Event()

    async def cut() -> None:
        async with await psycopg.AsyncConnection.connect(pair.first.database_url, autocommit=True) as connection:
            while not cutting.is_set():
                await connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND application_name = 'keyturn-listen'"
                )
                await asyncio.sleep(0.01)

    cutter = asyncio.create_task(cut())
    run = await pair.run(thread, "hi")
    path = f"/threads/{thread}/runs/{run}/stream"
    streaming = asyncio.create_task(pair.there.get(path, headers={"Last-Event-ID": "-1"}, timeout=30))
    await pair.until("SELECT 1 FROM crash_effects WHERE name = 'second'")
    await pair.let_go("second")
    seen = (await streaming).text.replace(HEARTBEAT, "")
    cutting.set()
    await cutter
    assert seen == (await pair.here.get(path, headers={"Last-Event-ID": "-1"})).text.replace(HEARTBEAT, "")
    assert seen.count("event: end") == 1
