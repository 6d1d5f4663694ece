"""Runs over the whole application: queues, cancels, disconnects, takeovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx
import pytest
import pytest_asyncio
from asgi import new_thread, serving
from sqlalchemy import text

from app.db.engine import Database
from app.resources import Resources
from app.runs.models import StopReason

SLOW = {"provider": "scripted", "params": {"rules": [], "else": "one two three", "latency_ms": 60_000}}
ECHO = {"provider": "scripted", "params": {"rules": [], "else": "You said: {input}"}}
GATED = {
    "provider": "scripted",
    "params": {
        "rules": [{"if": "pay", "tool_calls": [{"name": "refund", "args": {"order_id": "1", "amount": 5}}]}],
        "else": "You said: {input}",
    },
}


@pytest_asyncio.fixture
async def served(database: Database) -> AsyncIterator[tuple[httpx.AsyncClient, Resources]]:
    async with serving(database.url, heartbeat_seconds=0.2, shutdown_seconds=0.1, examples=False) as both:
        yield both


async def assistant(api: httpx.AsyncClient, model: dict[str, Any], **config: Any) -> str:
    body = {"graph_id": "react", "config": {"configurable": {"model": model, **config}}}
    made = await api.post("/assistants", json=body)
    assert made.status_code == 200, made.text
    return str(made.json()["assistant_id"])


def says(what: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": what}]}


async def texts(api: httpx.AsyncClient, thread: str) -> list[str]:
    values = (await api.get(f"/threads/{thread}")).json()["values"]
    return [m["content"] for m in values["messages"]]


async def get(api: httpx.AsyncClient, thread: str, run: str) -> dict[str, Any]:
    found: dict[str, Any] = (await api.get(f"/threads/{thread}/runs/{run}")).json()
    return found


async def running(api: httpx.AsyncClient, thread: str, run: str) -> None:
    async with asyncio.timeout(10):
        while (await get(api, thread, run))["status"] != "running":
            await asyncio.sleep(0.01)


async def test_runs_of_a_thread_follow_each_other(served: tuple[httpx.AsyncClient, Resources]) -> None:
    api, _ = served
    agent, thread = await assistant(api, ECHO), await new_thread(api)
    bodies = [{"assistant_id": agent, "input": says(str(i))} for i in range(5)]
    made = [(await api.post(f"/threads/{thread}/runs", json=body)).json() for body in bodies]
    for run in made:
        await api.get(f"/threads/{thread}/runs/{run['run_id']}/join")
    assert await texts(api, thread) == [t for i in range(5) for t in (str(i), f"You said: {i}")]
    assert (await api.get(f"/threads/{thread}")).json()["status"] == "idle"


async def test_reject_makes_nothing_on_a_busy_thread(served: tuple[httpx.AsyncClient, Resources]) -> None:
    api, _ = served
    agent, thread = await assistant(api, SLOW), await new_thread(api)
    body = {"assistant_id": agent, "input": says("hi")}
    await api.post(f"/threads/{thread}/runs", json=body)
    refused = await api.post(f"/threads/{thread}/runs", json={**body, "multitask_strategy": "reject"})
    assert (refused.status_code, refused.json()["code"]) == (409, "thread_busy")
    assert len((await api.get(f"/threads/{thread}/runs")).json()) == 1


async def test_a_run_does_not_wait_for_one_that_starts_later(served: tuple[httpx.AsyncClient, Resources]) -> None:
    api, _ = served
    agent, thread = await assistant(api, ECHO), await new_thread(api)
    body = {"assistant_id": agent, "input": says("later")}
    later = (await api.post(f"/threads/{thread}/runs", json={**body, "after_seconds": 3600})).json()
    await api.post(f"/threads/{thread}/runs/wait", json={**body, "input": says("now"), "multitask_strategy": "reject"})
    assert await texts(api, thread) == ["now", "You said: now"]
    assert (await get(api, thread, later["run_id"]))["status"] == "pending"


async def test_a_delayed_run_starts_when_it_is_due(served: tuple[httpx.AsyncClient, Resources]) -> None:
    api, _ = served
    agent, thread = await assistant(api, ECHO), await new_thread(api)
    body = {"assistant_id": agent, "input": says("later"), "after_seconds": 0.1}
    run = (await api.post(f"/threads/{thread}/runs", json=body)).json()["run_id"]
    assert (await get(api, thread, run))["status"] == "pending"
    async with asyncio.timeout(15):
        await api.get(f"/threads/{thread}/runs/{run}/join")
    assert await texts(api, thread) == ["later", "You said: later"]


async def test_a_cancelled_run_stops_and_the_next_one_starts(served: tuple[httpx.AsyncClient, Resources]) -> None:
    api, _ = served
    thread = await new_thread(api)
    slow, quick = await assistant(api, SLOW), await assistant(api, ECHO)
    first = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": slow, "input": says("a")})).json()["run_id"]
    second = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": quick, "input": says("b")})).json()["run_id"]
    await running(api, thread, first)
    cancelled = await api.post(f"/threads/{thread}/runs/{first}/cancel", params={"wait": True})
    assert cancelled.status_code == 200
    await api.get(f"/threads/{thread}/runs/{second}/join")
    stopped = await get(api, thread, first)
    assert (stopped["status"], stopped["stop_reason"]) == ("interrupted", "cancelled")
    assert await texts(api, thread) == ["a", "b", "You said: b"]
    again = await api.post(f"/threads/{thread}/runs/{first}/cancel")
    assert (again.status_code, again.json()["code"]) == (409, "run_over")


async def test_cancelling_a_waiting_run_ends_its_streams(served: tuple[httpx.AsyncClient, Resources]) -> None:
    api, _ = served
    agent, thread = await assistant(api, SLOW), await new_thread(api)
    body = {"assistant_id": agent, "input": says("a")}
    await api.post(f"/threads/{thread}/runs", json=body)
    waiting = (await api.post(f"/threads/{thread}/runs", json=body)).json()["run_id"]
    joined = asyncio.create_task(api.get(f"/threads/{thread}/runs/{waiting}/join"))
    assert (await api.post(f"/threads/{thread}/runs/{waiting}/cancel")).status_code == 202
    async with asyncio.timeout(10):
        assert (await joined).status_code == 200
    assert (await get(api, thread, waiting))["status"] == "interrupted"


async def test_input_queued_behind_a_question_waits_for_the_human(
    served: tuple[httpx.AsyncClient, Resources],
) -> None:
    api, _ = served
    thread = await new_thread(api)
    asking = await assistant(api, GATED, tools=["refund"], review={"tools": {"refund": {}}})
    slow = await assistant(api, {**ECHO, "params": {**ECHO["params"], "latency_ms": 50}})
    await api.post(f"/threads/{thread}/runs", json={"assistant_id": slow, "input": says("wait")})
    first = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": asking, "input": says("pay")})).json()
    queued = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": asking, "input": says("thanks")})).json()
    await api.get(f"/threads/{thread}/runs/{first['run_id']}/join")
    assert (await get(api, thread, queued["run_id"]))["status"] == "pending"
    assert (await api.get(f"/threads/{thread}")).json()["status"] == "interrupted"
    [item] = (await api.get("/inbox", params={"thread_id": thread})).json()["items"]
    assert (await api.post(f"/inbox/{item['id']}/response", json={"type": "response", "args": "no"})).status_code == 202
    await api.get(f"/threads/{thread}/runs/{queued['run_id']}/join")
    assert (await texts(api, thread))[-2:] == ["thanks", "You said: thanks"]


async def test_input_queued_behind_a_question_runs_when_the_question_is_closed_from_outside(
    served: tuple[httpx.AsyncClient, Resources],
) -> None:
    api, _ = served
    thread = await new_thread(api)
    asking = await assistant(api, GATED, tools=["refund"], review={"tools": {"refund": {}}})
    slow = await assistant(api, {**ECHO, "params": {**ECHO["params"], "latency_ms": 50}})
    await api.post(f"/threads/{thread}/runs", json={"assistant_id": slow, "input": says("wait")})
    first = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": asking, "input": says("pay")})).json()
    queued = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": asking, "input": says("thanks")})).json()
    await api.get(f"/threads/{thread}/runs/{first['run_id']}/join")
    ended = await api.post(f"/threads/{thread}/state", json={"values": None, "as_node": "__end__"})
    assert ended.status_code == 200, ended.text
    async with asyncio.timeout(15):
        await api.get(f"/threads/{thread}/runs/{queued['run_id']}/join")
    assert (await texts(api, thread))[-2:] == ["thanks", "You said: thanks"]


async def test_a_client_that_does_not_wait_cancels_if_it_said_so(
    served: tuple[httpx.AsyncClient, Resources], database: Database
) -> None:
    api, resources = served
    agent, thread = await assistant(api, SLOW), await new_thread(api)
    for how in ("wait", "stream"):
        body = {"assistant_id": agent, "input": says("a"), "on_disconnect": "cancel"}
        await disconnected(api, f"/threads/{thread}/runs/{how}", body)
        async with asyncio.timeout(10):
            while (last := (await api.get(f"/threads/{thread}/runs")).json()[0])["status"] in ("pending", "running"):
                await asyncio.sleep(0.01)
        assert (last["status"], last["stop_reason"]) == ("interrupted", StopReason.cancelled)
    async with asyncio.timeout(10):
        while resources.runs.claims.held:  # let go right after the run's end is committed
            await asyncio.sleep(0.01)


async def disconnected(api: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """Send a request and go away after the first bytes of the answer, as a browser that is closed."""
    sent = httpx.Request("POST", f"http://localhost{path}", json=body)
    answering, gone = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal gone
        if not gone:
            gone = True
            return {"type": "http.request", "body": sent.content, "more_body": False}
        await answering.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answering.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(k.lower().encode(), v.encode()) for k, v in sent.headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    transport = api._transport
    assert isinstance(transport, httpx.ASGITransport)
    await transport.app(scope, receive, send)  # type: ignore[arg-type]


async def test_a_run_whose_process_froze_is_taken_over_with_its_input(
    served: tuple[httpx.AsyncClient, Resources], database: Database
) -> None:
    """The second turn's message is not lost, and the first process can write nothing more."""
    api, resources = served
    thread = await new_thread(api)
    quick = await assistant(api, ECHO)
    await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": quick, "input": says("one")})
    slow = await assistant(api, {**SLOW, "params": {**SLOW["params"], "latency_ms": 300}})
    run = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": slow, "input": says("two")})).json()["run_id"]
    await running(api, thread, run)
    async with database.transaction() as tx:
        await tx.execute(
            text("UPDATE runs SET owner = 'frozen', lease_until = now() - interval '1 second' WHERE id = :id"), {"id": run}
        )
    [frozen] = resources.runs.claims.held.values()
    await resources.worker.take(frozen.run.thread_id)
    await api.get(f"/threads/{thread}/runs/{run}/join")
    assert await texts(api, thread) == ["one", "You said: one", "two", "one two three"]
    stream = (await api.get(f"/threads/{thread}/runs/{run}/stream", headers={"Last-Event-ID": "-1"})).text
    assert stream.count("event: end") == 1
    assert "event: attempt\r\ndata: " in stream.partition("id: 2-1\r\n")[2]


@pytest.mark.parametrize("step", [0, 1])
async def test_a_run_is_taken_over_between_a_tasks_writes_and_its_checkpoint(
    served: tuple[httpx.AsyncClient, Resources], database: Database, step: int
) -> None:
    """All tasks of a step are done and the step is not: nothing is \"next\", and still the run is not over."""
    api, resources = served
    agent, thread = await assistant(api, ECHO), await new_thread(api)
    await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": agent, "input": says("one")})
    made = await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": agent, "input": says("two")})
    run = made.headers["content-location"].rpartition("/")[2]
    async with database.transaction() as tx:  # as if the process had died just before it
        rows = await tx.execute(
            text("SELECT checkpoint_id FROM checkpoints WHERE metadata->>'run_id' = :run ORDER BY 1 OFFSET :step"),
            {"run": run, "step": step + 1},
        )
        gone = list(rows.scalars())
        assert gone
        for table in ("checkpoints", "checkpoint_writes"):
            await tx.execute(text(f"DELETE FROM {table} WHERE checkpoint_id = ANY(:gone)"), {"gone": gone})
        await tx.execute(
            text("UPDATE runs SET status = 'running', owner = 'dead', lease_until = now() - interval '1s' WHERE id = :run"),
            {"run": run},
        )
    await resources.worker.take(UUID(thread))
    async with asyncio.timeout(10):
        while (await get(api, thread, run))["status"] == "running":
            await asyncio.sleep(0.01)
    assert (await get(api, thread, run))["status"] == "success"
    assert await texts(api, thread) == ["one", "You said: one", "two", "You said: two"]


async def test_a_run_that_does_not_end_is_given_up(served: tuple[httpx.AsyncClient, Resources], database: Database) -> None:
    api, resources = served
    agent, thread = await assistant(api, SLOW), await new_thread(api)
    run = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": agent, "input": says("a")})).json()["run_id"]
    await running(api, thread, run)
    async with database.transaction() as tx:
        await tx.execute(
            text("UPDATE runs SET attempts = 5, owner = 'frozen', lease_until = now() - interval '1 second' WHERE id = :id"),
            {"id": run},
        )
    [frozen] = resources.runs.claims.held.values()
    await resources.worker.take(frozen.run.thread_id)
    result = (await api.get(f"/threads/{thread}/runs/{run}/join")).json()
    assert result["__error__"]["code"] == "attempts_exhausted"
    assert (await api.get(f"/threads/{thread}")).json()["status"] == "error"


async def test_a_drained_process_gives_its_runs_back(database: Database) -> None:
    async with serving(database.url, shutdown_seconds=0.1, examples=False) as (api, resources):
        agent = await assistant(api, {**SLOW, "params": {**SLOW["params"], "latency_ms": 500}})
        thread = await new_thread(api)
        run = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": agent, "input": says("a")})).json()["run_id"]
        await running(api, thread, run)
        await resources.drain()
        assert (await get(api, thread, run))["status"] == "pending"
    async with serving(database.url, examples=False) as (api, _):
        async with asyncio.timeout(20):
            await api.get(f"/threads/{thread}/runs/{run}/join")
        assert await texts(api, thread) == ["a", "one two three"]


async def test_clients_cannot_forge_the_metadata_that_runs_are_told_apart_by(
    served: tuple[httpx.AsyncClient, Resources],
) -> None:
    api, _ = served
    agent, thread = await assistant(api, ECHO), await new_thread(api)
    body = {"assistant_id": agent, "input": says("a"), "metadata": {"run_id": "forged", "mine": 1}}
    run = (await api.post(f"/threads/{thread}/runs", json=body)).json()
    assert run["metadata"]["mine"] == 1
    await api.get(f"/threads/{thread}/runs/{run['run_id']}/join")
    state = (await api.get(f"/threads/{thread}/state")).json()
    assert state["metadata"]["run_id"] == run["run_id"]
    assert state["metadata"]["mine"] == 1


async def test_a_run_at_an_older_checkpoint_answers_with_its_own_values(
    served: tuple[httpx.AsyncClient, Resources],
) -> None:
    api, _ = served
    agent, thread = await assistant(api, ECHO), await new_thread(api)
    for i in range(2):
        await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": agent, "input": says(str(i))})
    history = (await api.get(f"/threads/{thread}/history", params={"limit": 20})).json()
    older = next(s for s in history if len(s["values"].get("messages", ())) == 2 and not s["next"])
    forked = await api.post(
        f"/threads/{thread}/runs/wait",
        json={"assistant_id": agent, "input": says("fork"), "checkpoint": older["checkpoint"]},
    )
    expected = ["0", "You said: 0", "fork", "You said: fork"]
    assert [m["content"] for m in forked.json()["messages"]] == expected
    assert await texts(api, thread) == expected
