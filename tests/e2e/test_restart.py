"""A server that stops, or dies, between a question and its answer, for each verb; then goes on on another process."""

from __future__ import annotations

import signal
from typing import Any

import httpx
import pytest
from processes import Servers

CALLS = [{"name": "audit", "args": {"order_id": str(i), "amount": 1500}} for i in range(3)]
FREE = {"name": "get_weather", "args": {"location": "Lisbon"}}
LAYOUTS = {"one gated": CALLS[:1], "three gated": CALLS, "one gated, one free": [CALLS[0], FREE]}
EDIT = {"action": "audit", "args": {"order_id": "edited", "amount": 2}}
VERBS: dict[str, Any] = {"accept": None, "edit": EDIT, "response": "Ask first.", "ignore": None}
TOLD = {"accept": "1500.00", "edit": "2.00 was refunded on order edited", "response": "Ask first.", "ignore": "Not carried out"}


async def asked(api: httpx.AsyncClient, calls: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """A thread whose agent has made these calls and waits for a human."""
    model = {"provider": "scripted", "params": {"rules": [{"if": "go", "tool_calls": calls}], "else": "Done."}}
    config = {"model": model, "tools": ["audit", "get_weather"], "review": {"tools": {"audit": {}}}}
    made = await api.post("/assistants", json={"graph_id": "react", "config": {"configurable": config}})
    thread = (await api.post("/threads", json={})).json()["thread_id"]
    body = {"assistant_id": made.json()["assistant_id"], "input": {"messages": [{"role": "user", "content": "go"}]}}
    assert (await api.post(f"/threads/{thread}/runs/wait", json=body)).status_code == 200
    return thread, (await api.get("/inbox", params={"thread_id": thread})).json()["items"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_every_verb_and_layout_across_a_restart(servers: Servers, fresh_database_url: str, how: signal.Signals) -> None:
    server = await servers.start(fresh_database_url)
    waiting = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        for verb in VERBS:
            for layout, calls in LAYOUTS.items():
                waiting[verb, layout] = await asked(api, calls)
    await server.restart(how)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        for (verb, layout), (thread, items) in waiting.items():
            assert len(items) == len([c for c in LAYOUTS[layout] if c is not FREE])
            for item in items:
                answer = {"type": verb, "args": VERBS[verb]}
                decided = await api.post(f"/inbox/{item['id']}/response", json=answer)
                assert decided.status_code == 202, decided.text
            await api.get(f"/threads/{thread}/runs/{decided.json()['run_id']}/join")
            state = (await api.get(f"/threads/{thread}/state")).json()
            [ai, *_] = [m for m in state["values"]["messages"] if m["type"] == "ai"]
            results = {m["tool_call_id"]: m for m in state["values"]["messages"] if m["type"] == "tool"}
            tools = [m for m in state["values"]["messages"] if m["type"] == "tool"]
            assert len(tools) == len(LAYOUTS[layout]), (verb, layout)
            assert results.keys() == {call["id"] for call in ai["tool_calls"]}
            for item in items:
                assert TOLD[verb] in results[item["tool_call_id"]]["content"]
                settled = (await api.get(f"/inbox/{item['id']}")).json()
                assert settled["status"] == "settled"
                assert settled["outcome"]["tool_message_id"] == results[item["tool_call_id"]]["id"]
            assert state["next"] == []
            assert (await api.get(f"/threads/{thread}")).json()["status"] == "idle"
    await server.stop()
