"""A run's webhook is told of its end: what it is told, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any
from uuid import UUID

import httpx
import pytest
import pytest_asyncio
from asgi import new_thread, serving
from desk import PROJECT, Desk
from fakes.receiver import Receiver, receiving
from processes import free_port

from app.db.engine import Database

TOOL = [{"name": "transfer", "args": {"to": "Ada", "amount": 1}}]
GO = {"messages": [{"role": "user", "content": "go"}]}


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest_asyncio.fixture
async def api(database: Database) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(database.url, config=PROJECT, examples=False, allow_private_addresses=True, shutdown_seconds=0.1) as (
        client,
        _,
    ):
        yield client


async def agent(api: httpx.AsyncClient, *calls: dict[str, Any], **config: Any) -> str:
    """An assistant whose model makes these calls, or only says something."""
    if not calls:
        config = {"model": {"provider": "scripted", "params": {"rules": [], "else": "Done."}}, **config}
    return await Desk(api).agent(*calls, **config)


async def ended(api: httpx.AsyncClient, thread: str, assistant: str, **body: Any) -> str:
    """Run something to its end. Returns the run's id."""
    done = await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": assistant, "input": GO, **body})
    assert done.status_code == 200, done.text
    return str(done.headers["content-location"].rpartition("/")[2])


async def row(database: Database, run: str, status: str) -> dict[str, Any]:
    """The delivery of a run, once it has a status."""
    async with asyncio.timeout(20), database.pool.connection() as connection:
        while True:
            found = await connection.execute("SELECT * FROM webhook_deliveries WHERE run_id = %s", [UUID(run)])
            rows = await found.fetchall()
            if [r["status"] for r in rows] == [status]:
                return rows[0]
            await asyncio.sleep(0.01)


async def test_a_run_that_ended_is_told_of_once(api: httpx.AsyncClient, receiver: Receiver, database: Database) -> None:
    thread, assistant = await new_thread(api), await agent(api)
    run = await ended(api, thread, assistant, webhook=f"{receiver.url}/one", metadata={"order": "A17"})
    told = await receiver.get("/one")
    shown = (await api.get(f"/threads/{thread}/runs/{run}")).json()
    assert shown["kwargs"]["webhook"] == f"{receiver.url}/one"
    times = ("created_at", "updated_at", "run_started_at", "run_ended_at", "webhook_sent_at")
    assert {k: told.json[k] for k in shown if k not in times} == {k: v for k, v in shown.items() if k not in times}
    at = {name: datetime.fromisoformat(told.json[name]) for name in times}
    assert all(at[name] == datetime.fromisoformat(shown[name]) for name in ("created_at", "updated_at"))
    assert at["created_at"] <= at["run_started_at"] < at["run_ended_at"] == at["updated_at"] < at["webhook_sent_at"]
    assert (told.json["status"], told.json["metadata"]["order"]) == ("success", "A17")
    assert told.json["values"] == (await api.get(f"/threads/{thread}")).json()["values"]
    assert told.json["interrupts"] == []
    assert told.headers["content-type"] == "application/json"
    assert told.headers["user-agent"].startswith("Keyturn/")
    delivery = await row(database, run, "delivered")
    assert told.id == str(delivery["id"])
    assert (delivery["attempts"], delivery["last_status"], delivery["last_error"]) == (1, 204, None)
    assert int(told.headers["webhook-timestamp"]) >= int(delivery["created_at"].timestamp())

    await ended(api, thread, assistant)  # names none
    await ended(api, thread, assistant, webhook=f"{receiver.url}/two")
    await receiver.get("/two")
    assert [r.path for r in receiver.received] == ["/one", "/two"]


async def test_a_question_is_told_of_and_then_what_became_of_the_answer(api: httpx.AsyncClient, receiver: Receiver) -> None:
    desk = Desk(api)
    thread, [item] = await desk.asked(await agent(api, *TOOL), webhook=f"{receiver.url}/")
    asked = (await receiver.get("/")).json
    assert (asked["status"], asked["stop_reason"]) == ("success", "human_input")
    [interrupt] = asked["interrupts"]
    assert interrupt["value"][0]["action_request"] == {"action": "transfer", "args": {"to": "Ada", "amount": 1}}
    assert (await api.get(f"/inbox/{interrupt['id']}")).json()["id"] == item["id"]
    assert asked["values"] == (await api.get(f"/threads/{thread}")).json()["values"]

    answered = await desk.answer(item, "response", "No.")
    told = (await receiver.get("/", 2)).json
    assert told["run_id"] == answered.json()["run_id"] != asked["run_id"]
    assert (told["status"], told["stop_reason"], told["interrupts"]) == ("success", "finished", [])
    assert told["values"]["messages"][-1]["content"] == "Done."


async def test_a_resume_may_name_a_webhook_of_its_own(api: httpx.AsyncClient, receiver: Receiver) -> None:
    desk = Desk(api)
    assistant = await agent(api, *TOOL)
    thread, [item] = await desk.asked(assistant, webhook=f"{receiver.url}/first")
    resume = {item["interrupt_id"]: {"type": "ignore", "args": None}}
    body = {"assistant_id": assistant, "command": {"resume": resume}, "webhook": f"{receiver.url}/second"}
    assert (await api.post(f"/threads/{thread}/runs/wait", json=body)).status_code == 200
    assert (await receiver.get("/second")).json["stop_reason"] == "finished"
    assert len(receiver.at("/first")) == 1


async def test_an_error_is_told_of(api: httpx.AsyncClient, receiver: Receiver) -> None:
    thread = await new_thread(api)
    again = [{"name": "get_weather", "args": {"city": "Rome"}}]
    run = await ended(api, thread, await agent(api, *again, recursion_limit=1), webhook=f"{receiver.url}/")
    told = (await receiver.get("/")).json
    assert (told["run_id"], told["status"], told["error"]["code"]) == (run, "error", "recursion_limit")
    assert told["values"]["messages"][0]["content"] == "go"


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
async def test_a_cancelled_run_is_told_of_whether_it_began_or_not(
    api: httpx.AsyncClient, receiver: Receiver, action: str
) -> None:
    slow = {"provider": "scripted", "params": {"rules": [], "else": "one two", "latency_ms": 60_000}}
    thread, assistant = await new_thread(api), await agent(api, model=slow)
    runs = [
        (await api.post(f"/threads/{thread}/runs", json={"assistant_id": assistant, "input": GO, "webhook": url})).json()
        for url in (f"{receiver.url}/running", f"{receiver.url}/queued")
    ]
    status, reason = ("interrupted", "cancelled") if action == "interrupt" else ("rollback", "rolled_back")
    async with asyncio.timeout(10):
        while not (await api.get(f"/threads/{thread}/state")).json()["values"]:
            await asyncio.sleep(0.01)
    for run, path, has in reversed(list(zip(runs, ("/running", "/queued"), (True, False), strict=True))):
        cancelled = await api.post(f"/threads/{thread}/runs/{run['run_id']}/cancel?action={action}&wait=1")
        assert cancelled.status_code == 200, cancelled.text
        told = (await receiver.get(path)).json
        assert (told["run_id"], told["status"], told["stop_reason"]) == (run["run_id"], status, reason)
        assert (told["run_started_at"] is not None) is has
        assert told["run_ended_at"] is not None
        if not has:
            assert told["values"] is None
    assert len(receiver.received) == 2


async def test_a_receiver_that_is_away_is_told_later(api: httpx.AsyncClient, database: Database) -> None:
    port = free_port()
    run = await ended(api, await new_thread(api), await agent(api), webhook=f"http://127.0.0.1:{port}/")
    async with asyncio.timeout(10):
        while not (delivery := await row(database, run, "pending"))["last_error"]:
            await asyncio.sleep(0.01)
    assert (delivery["attempts"], delivery["last_status"]) == (1, None)
    assert delivery["last_error"].startswith("ConnectError")
    async with receiving(port) as receiver:
        assert (await receiver.get("/")).id == str(delivery["id"])
        assert (await row(database, run, "delivered"))["attempts"] >= 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/my/route", "paths of this server"),
        ("ftp://example.com/", "http://"),
        ("https://user:secret@example.com/", "password"),
        ("http://", "host"),
        ("http://exa mple.com/", "host"),
        ("http://example.com:99999/", "port"),
        ("http://example.com/" + "a" * 2048, "2048"),
        ("http://169.254.169.254/latest", "public"),
        ("", "http://"),
    ],
)
async def test_a_webhook_that_cannot_be_meant_is_refused(api: httpx.AsyncClient, url: str, message: str) -> None:
    thread, assistant = await new_thread(api), await agent(api)
    refused = await api.post(f"/threads/{thread}/runs", json={"assistant_id": assistant, "input": GO, "webhook": url})
    assert refused.status_code == 422
    [error] = refused.json()["errors"]
    assert error["path"] == "webhook"
    assert message in error["message"]
    assert "secret" not in refused.text
    assert (await api.get(f"/threads/{thread}/runs")).json() == []


async def test_private_addresses_are_refused_by_default(receiver: Receiver, database: Database) -> None:
    async with serving(database.url, config=PROJECT, examples=False) as (api, _):
        assistant = await agent(api)
        for host in ("localhost", "127.0.0.1", "[::1]", "10.1.2.3", "[::ffff:192.168.0.1]", "0.0.0.0"):
            body = {"assistant_id": assistant, "input": GO, "webhook": f"http://{host}:{receiver.port}/"}
            refused = await api.post(f"/threads/{await new_thread(api)}/runs", json=body)
            assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "webhook"), host
        # 127.0.0.1, written in a way that only who resolves it can tell.
        run = await ended(api, await new_thread(api), assistant, webhook=f"http://2130706433:{receiver.port}/")
        delivery = await row(database, run, "failed")
        assert (delivery["attempts"], delivery["last_error"]) == (1, "2130706433 is not a public address")
        assert receiver.received == []
