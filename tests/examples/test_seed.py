"""The first question: there at the first start, once, however many processes start and however often."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
from asgi import serving

from app.examples.seed import DEMO_THREAD


async def pending(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """What waits, once the demo's run has asked."""
    async with asyncio.timeout(20):
        while not (items := (await client.get("/inbox", params={"status": "all"})).json()["items"]):
            await asyncio.sleep(0.05)
    return [item for item in items if item["status"] == "pending"]


async def runs(client: httpx.AsyncClient) -> int:
    return len((await client.get(f"/threads/{DEMO_THREAD}/runs")).json())


async def test_two_processes_at_once_and_a_restart(fresh_database_url: str) -> None:
    async with AsyncExitStack() as stack:
        (one, _), _ = await asyncio.gather(
            stack.enter_async_context(serving(fresh_database_url)), stack.enter_async_context(serving(fresh_database_url))
        )
        [item] = await pending(one)
        assert item["thread_id"] == str(DEMO_THREAD)
        assert item["action_request"] == {"action": "audit", "args": {"order_id": "12345", "amount": 1500}}
        assert await runs(one) == 1
    async with serving(fresh_database_url) as (again, _):
        assert [i["id"] for i in await pending(again)] == [item["id"]]
        assert await runs(again) == 1
        accepted = await again.post(f"/inbox/{item['id']}/response", json={"type": "accept"})
        assert accepted.status_code == 202
        run = (await again.get(f"/threads/{DEMO_THREAD}/runs/{accepted.json()['run_id']}/join")).json()
        assert "Audit passed" in run["messages"][-1]["content"]
        await again.delete(f"/threads/{DEMO_THREAD}")
    async with serving(fresh_database_url) as (later, _):
        assert await pending(later) == []
        assert (await later.get(f"/threads/{DEMO_THREAD}")).status_code == 404


async def test_without_examples_there_is_no_demo(fresh_database_url: str) -> None:
    async with serving(fresh_database_url, examples=False) as (client, _):
        assert (await client.get(f"/threads/{DEMO_THREAD}")).status_code == 404
        names = {a["name"] for a in (await client.post("/assistants/search", json={"limit": 100})).json()}
        assert names == {"react"}


async def test_every_example_runs(fresh_database_url: str) -> None:
    async with serving(fresh_database_url) as (client, _):
        thread = (await client.post("/threads", json={})).json()["thread_id"]

        async def say(assistant: str, value: Any) -> Any:
            body = {"assistant_id": assistant, "input": value, "if_not_exists": "create"}
            return (await client.post(f"/threads/{thread}/runs/wait", json=body)).json()

        message = {"messages": [{"role": "user", "content": "What is the weather in Lisbon?"}]}
        assert "Lisbon" in (await say("weather", message))["messages"][-1]["content"]
        message = {"messages": [{"role": "user", "content": "Please refund 80 for order 7."}]}
        assert (await say("refund_desk", message))["messages"][-1]["content"] == "Done. Refunded 80.00 on order 7."
        thread = (await client.post("/threads", json={})).json()["thread_id"]
        asked = await say("poem", {"topic": "rain"})
        assert asked["__interrupt__"][0]["value"]["action_request"]["action"] == "publish"
