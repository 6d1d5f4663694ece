"""A run on a busy thread: what becomes of it, and of those that were there before. And cancelling, in all its forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
from asgi import new_thread, serving
from sqlalchemy import text

from app.db.engine import Database
from app.resources import Resources

SLOW = {"provider": "scripted", "params": {"rules": [], "else": "one two three", "latency_ms": 60_000}}
ECHO = {"provider": "scripted", "params": {"rules": [], "else": "You said: {input}"}}
PROJECT = Path(__file__).parent / "project" / "langgraph.json"
Served = tuple[httpx.AsyncClient, Resources]


@pytest_asyncio.fixture
async def served(database: Database) -> AsyncIterator[Served]:
    async with serving(database.url, heartbeat_seconds=0.2, shutdown_seconds=0.1, examples=False) as both:
        yield both


async def assistant(api: httpx.AsyncClient, model: dict[str, Any], **config: Any) -> str:
    body = {"graph_id": "react", "config": {"configurable": {"model": model, **config}}}
    made = await api.post("/assistants", json=body)
    assert made.status_code == 200, made.text
    return str(made.json()["assistant_id"])


def run_of(agent: str, what: str, **more: Any) -> dict[str, Any]:
    return {"assistant_id": agent, "input": {"messages": [{"role": "user", "content": what}]}, **more}


async def start(api: httpx.AsyncClient, thread: str, agent: str, what: str, **more: Any) -> str:
    made = await api.post(f"/threads/{thread}/runs", json=run_of(agent, what, **more))
    assert made.status_code == 200, made.text
    return str(made.json()["run_id"])


async def texts(api: httpx.AsyncClient, thread: str) -> list[str]:
    state = (await api.get(f"/threads/{thread}/state")).json()
    return [m["content"] for m in state["values"].get("messages", [])]


async def status(api: httpx.AsyncClient, thread: str, run: str) -> tuple[int, str | None]:
    found = await api.get(f"/threads/{thread}/runs/{run}")
    return found.status_code, found.json().get("status")


async def in_model(api: httpx.AsyncClient, thread: str, what: str) -> None:
    """Wait until the run on the thread has stored its input."""
    async with asyncio.timeout(10):
        while what not in await texts(api, thread):
            await asyncio.sleep(0.01)


async def joined(api: httpx.AsyncClient, thread: str, run: str) -> None:
    async with asyncio.timeout(20):
        await api.get(f"/threads/{thread}/runs/{run}/join")


async def test_interrupt_keeps_what_was_done_and_starts_after_it(served: Served) -> None:
    api, _ = served
    thread, slow, echo = await new_thread(api), await assistant(api, SLOW), await assistant(api, ECHO)
    first = await start(api, thread, slow, "a")
    await in_model(api, thread, "a")
    queued = await start(api, thread, echo, "never")
    newest = await start(api, thread, echo, "b", multitask_strategy="interrupt")
    await joined(api, thread, newest)
    assert await status(api, thread, first) == (200, "interrupted")
    assert await status(api, thread, queued) == (200, "interrupted")
    assert await status(api, thread, newest) == (200, "success")
    assert await texts(api, thread) == ["a", "b", "You said: b"]
    assert (await api.get(f"/threads/{thread}")).json()["status"] == "idle"


async def test_rollback_forgets_the_other_runs_and_starts_from_the_state_before_them(
    served: Served, database: Database
) -> None:
    api, _ = served
    thread, slow, echo = await new_thread(api), await assistant(api, SLOW), await assistant(api, ECHO)
    await joined(api, thread, await start(api, thread, echo, "one"))
    before = await stored(database, thread)
    first = await start(api, thread, slow, "a")
    await in_model(api, thread, "a")
    queued = await start(api, thread, echo, "never")
    newest = await start(api, thread, echo, "b", multitask_strategy="rollback")
    await joined(api, thread, newest)
    assert await status(api, thread, first) == (404, None)
    assert await status(api, thread, queued) == (404, None)
    assert await texts(api, thread) == ["one", "You said: one", "b", "You said: b"]
    newer = await start(api, thread, slow, "c")
    await in_model(api, thread, "c")
    shown = (await api.get(f"/threads/{thread}")).json()["values"]
    assert (await api.post(f"/threads/{thread}/runs/{newest}/cancel")).status_code == 409
    undone = await api.post(f"/threads/{thread}/runs/{newer}/cancel", params={"action": "rollback", "wait": True})
    assert undone.status_code == 200
    assert (await api.get(f"/threads/{thread}")).json()["values"] == shown
    assert (await api.get(f"/threads/{thread}")).json()["status"] == "idle"
    await api.post(f"/threads/{thread}/runs/{(await start(api, thread, slow, 'd'))}/cancel?action=rollback&wait=1")
    after = await stored(database, thread)
    assert {k: v for k, v in after.items() if k in before} == before
    assert await texts(api, thread) == ["one", "You said: one", "b", "You said: b"]


async def test_the_first_run_of_a_thread_can_be_rolled_back(served: Served, database: Database) -> None:
    api, _ = served
    thread, slow = await new_thread(api), await assistant(api, SLOW)
    run = await start(api, thread, slow, "a")
    await in_model(api, thread, "a")
    assert (await api.post(f"/threads/{thread}/runs/{run}/cancel?action=rollback&wait=1")).status_code == 200
    assert await status(api, thread, run) == (404, None)
    assert await texts(api, thread) == []
    assert await stored(database, thread) == {}


async def stored(database: Database, thread: str) -> dict[tuple[str, ...], int]:
    """Every row that the saver keeps of a thread, by its key, with its size."""
    async with database.transaction() as tx:
        rows = await tx.execute(
            text("""
                SELECT 'c', checkpoint_ns, checkpoint_id, '', '', pg_column_size(checkpoint)
                FROM checkpoints WHERE thread_id = :id
                UNION ALL SELECT 'b', checkpoint_ns, channel, version, '', length(blob)
                FROM checkpoint_blobs WHERE thread_id = :id
                UNION ALL SELECT 'w', checkpoint_ns, checkpoint_id, task_id, idx::text, length(blob)
                FROM checkpoint_writes WHERE thread_id = :id
            """),
            {"id": thread},
        )
        return {tuple(row)[:5]: row[5] for row in rows}


@pytest_asyncio.fixture
async def project(database: Database) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(database.url, heartbeat_seconds=0.2, shutdown_seconds=0.1, config=PROJECT) as (api, _):
        yield api


async def asked(api: httpx.AsyncClient, thread: str) -> dict[str, Any]:
    """The one open question of a thread."""
    async with asyncio.timeout(10):
        while not (items := (await api.get("/inbox", params={"thread_id": thread})).json()["items"]):
            await asyncio.sleep(0.01)
    [item] = items
    return item  # type: ignore[no-any-return]


async def answered(api: httpx.AsyncClient, item: dict[str, Any], answer: Any) -> str:
    """Answer a question. The run that carries the answer."""
    done = await api.post(f"/inbox/{item['id']}/response", json=answer)
    assert done.status_code == 202, done.text
    return str(done.json()["run_id"])


@pytest.mark.parametrize("graph", ["asks", "outer"])
async def test_rolling_back_a_resuming_run_opens_its_question_again(
    project: httpx.AsyncClient, database: Database, graph: str
) -> None:
    """Whatever the run had stored is undone, the answer too: of two questions of one node, the second alone."""
    api = project
    thread = await new_thread(api)
    await joined(api, thread, await start(api, thread, graph, "hi"))
    first = await asked(api, thread)
    await joined(api, thread, await answered(api, first, {"type": "response", "args": "one"}))
    second = await asked(api, thread)
    before = await stored(database, thread)
    run = await answered(api, second, {"type": "response", "args": "two"})
    async with asyncio.timeout(10):
        while await stored(database, thread) == before or not await holds(api, thread):
            await asyncio.sleep(0.01)
    assert (await api.post(f"/threads/{thread}/runs/{run}/cancel?action=rollback&wait=1")).status_code == 200
    assert await status(api, thread, run) == (404, None)
    assert await stored(database, thread) == before
    again = await asked(api, thread)
    assert (again["id"], again["value"], again["status"]) == (second["id"], second["value"], "pending")
    assert again["version"] > second["version"]
    assert (await api.get(f"/threads/{thread}")).json()["status"] == "interrupted"
    other = await answered(api, again, {"type": "response", "args": "other"})
    async with asyncio.timeout(10):
        while not await holds(api, thread):
            await asyncio.sleep(0.01)
    await api.post(f"/threads/{thread}/runs/{other}/cancel?wait=1")
    async with database.transaction() as tx:
        assert await tx.scalar(text("SELECT count(*) FROM run_base_writes")) == 0


async def holds(api: httpx.AsyncClient, thread: str) -> bool:
    """Whether the graph has come to its last node."""
    state = (await api.get(f"/threads/{thread}/state", params={"subgraphs": True})).json()
    inner = [t["state"]["next"] for t in state["tasks"] if isinstance(t.get("state"), dict)]
    return "hold" in (state["next"] if not inner else inner[0])


async def test_a_call_that_was_carried_out_before_a_rollback_is_not_carried_out_again(project: httpx.AsyncClient) -> None:
    api = project
    thread = await new_thread(api)
    rules = [
        {"if": "pay", "tool_calls": [{"name": "pay", "args": {"amount": 5}}]},
        {"after_tool": "pay", "tool_calls": [{"name": "hold", "args": {}}]},
    ]
    model = {"provider": "scripted", "params": {"rules": rules, "else": "?"}}
    agent = await assistant(api, model, tools=["pay", "hold"], review={"tools": {"pay": {}}})
    await joined(api, thread, await start(api, thread, agent, "pay"))
    for _ in range(2):
        run = await answered(api, await asked(api, thread), {"type": "accept", "args": None})
        await in_model(api, thread, "paid 5")
        assert (await api.post(f"/threads/{thread}/runs/{run}/cancel?action=rollback&wait=1")).status_code == 200
        assert "paid 5" not in await texts(api, thread)
    effects = (await api.post("/store/items/search", json={"namespace_prefix": ["effects"]})).json()["items"]
    assert len(effects) == 1


@pytest.mark.parametrize("strategy", ["enqueue", "reject", "interrupt", "rollback"])
async def test_two_hundred_submissions_at_once_leave_one_running_and_lose_none(
    served: Served, database: Database, strategy: str
) -> None:
    api, _ = served
    thread, echo = await new_thread(api), await assistant(api, ECHO)
    async with database.transaction() as tx:
        await tx.execute(text(WATCH))
    try:
        answers = await asyncio.gather(
            *(api.post(f"/threads/{thread}/runs", json=run_of(echo, str(i), multitask_strategy=strategy)) for i in range(200))
        )
        accepted = [a.json() for a in answers if a.status_code == 200]
        assert {a.status_code for a in answers} <= {200, 409}
        assert strategy == "reject" or len(accepted) == 200
        assert {a.json()["code"] for a in answers if a.status_code == 409} <= {"thread_busy"}
        async with asyncio.timeout(60):
            while (await api.get(f"/threads/{thread}")).json()["status"] == "busy":
                await asyncio.sleep(0.05)
        async with database.transaction() as tx:
            rows = (await tx.execute(text("SELECT id, status FROM runs WHERE thread_id = :id"), {"id": thread})).all()
            most = await tx.scalar(text("SELECT max(running) FROM watched WHERE thread_id = :id"), {"id": thread})
    finally:
        async with database.transaction() as tx:
            await tx.execute(text("DROP TRIGGER watch ON runs; DROP FUNCTION watch; DROP TABLE watched"))
    assert most == 1
    kept = {str(row.id): row.status for row in rows}
    done = [run for run, ended in kept.items() if ended == "success"]
    if strategy in ("enqueue", "reject"):
        assert sorted(done) == sorted(a["run_id"] for a in accepted)
    else:
        assert set(kept.values()) <= {"success", "interrupted"}
        assert strategy != "interrupt" or len(kept) == 200
    said = [t for t in await texts(api, thread) if not t.startswith("You")]
    assert len(set(said)) == len(said)
    assert len(said) >= len(done)
    if strategy == "rollback":
        assert len(said) == len(done)  # what was undone left nothing


WATCH = """
CREATE TABLE watched (thread_id uuid, running int);
CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO watched SELECT NEW.thread_id, count(*) FROM runs WHERE thread_id = NEW.thread_id AND status = 'running';
    RETURN NEW;
END $$;
CREATE TRIGGER watch AFTER INSERT OR UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION watch();
"""


async def test_many_runs_are_cancelled_by_name_by_thread_and_by_status(served: Served) -> None:
    api, _ = served
    slow = await assistant(api, SLOW)
    threads = [await new_thread(api) for _ in range(3)]
    runs = {t: [await start(api, t, slow, "a"), await start(api, t, slow, "b")] for t in threads}

    async def left() -> list[str]:
        await asyncio.gather(*(joined(api, t, r) for t, both in runs.items() for r in both if r not in live))
        return [r for t, both in runs.items() for r in both if (await status(api, t, r))[1] in ("pending", "running")]

    live = [r for both in runs.values() for r in both[:1]] + [r for both in runs.values() for r in both[1:]]
    first = threads[0]
    live.remove(runs[first][1])
    named = await api.post("/runs/cancel", json={"thread_id": first, "run_ids": [runs[first][1]]})
    assert named.status_code == 204
    assert sorted(await left()) == sorted(live)
    live.remove(runs[first][0])
    assert (await api.post("/runs/cancel", json={"thread_id": first})).status_code == 204
    assert sorted(await left()) == sorted(live)
    live = [r for r in live if r not in (runs[threads[1]][1], runs[threads[2]][1])]
    assert (await api.post("/runs/cancel", json={"status": "pending"})).status_code == 204
    assert sorted(await left()) == sorted(live)
    live = []
    assert (await api.post("/runs/cancel", json={"status": "all"})).status_code == 204
    assert await left() == []


@pytest.mark.parametrize(
    "body", [{"status": "all"}, {"thread_id": str(uuid4())}, {"thread_id": str(uuid4()), "run_ids": [str(uuid4())]}]
)
async def test_to_cancel_nothing_is_said(served: Served, body: dict[str, Any]) -> None:
    api, _ = served
    refused = await api.post("/runs/cancel", json=body)
    assert (refused.status_code, refused.json()["code"]) == (404, "no_runs_to_cancel")


@pytest.mark.parametrize(
    "body", [{}, {"run_ids": [str(uuid4())]}, {"thread_id": str(uuid4()), "run_ids": [str(uuid4())], "status": "all"}]
)
async def test_what_to_cancel_must_be_named_in_one_way(served: Served, body: dict[str, Any]) -> None:
    api, _ = served
    assert (await api.post("/runs/cancel", json=body)).status_code == 422
