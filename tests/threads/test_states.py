"""State over HTTP: reading it, its history, and writing it from outside a run."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx
import pytest
from asgi import HI, new_thread, ran, serving

from app.auth import SCOPES, create_key
from app.db.engine import Database
from app.resources import Resources

EMPTY = {
    "values": {},
    "next": [],
    "tasks": [],
    "metadata": None,
    "created_at": None,
    "checkpoint": None,
    "parent_checkpoint": None,
    "interrupts": [],
    "checkpoint_id": None,
    "parent_checkpoint_id": None,
}

GATED = {
    "graph_id": "react",
    "config": {
        "configurable": {
            "model": {
                "provider": "scripted",
                "params": {
                    "rules": [
                        {"if": "refund", "tool_calls": [{"name": "refund", "args": {"order_id": "1", "amount": 5}}]},
                        {"after_tool": "refund", "reply": "Done: {result}"},
                    ],
                    "else": "Hm.",
                },
            },
            "tools": ["refund"],
            "review": {"tools": {"refund": {}}},
        }
    },
}


async def state(api: httpx.AsyncClient, thread_id: str, **params: Any) -> Any:
    got = await api.get(f"/threads/{thread_id}/state", params=params)
    assert got.status_code == 200, got.text
    return got.json()


async def write(api: httpx.AsyncClient, thread_id: str, **body: Any) -> httpx.Response:
    return await api.post(f"/threads/{thread_id}/state", json=body)


async def gated_thread(api: httpx.AsyncClient) -> str:
    """A thread on which a refund waits for a human."""
    assistant = (await api.post("/assistants", json=GATED)).json()
    thread_id = await new_thread(api)
    body = {"assistant_id": assistant["assistant_id"], "input": {"messages": [{"role": "user", "content": "refund"}]}}
    result = await api.post(f"/threads/{thread_id}/runs/wait", json=body)
    assert "__interrupt__" in result.json(), result.text
    return thread_id


async def test_a_thread_that_never_ran_has_the_empty_state(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    assert await state(api, thread_id) == EMPTY
    assert (await api.post(f"/threads/{thread_id}/history")).json() == []
    assert (await api.get(f"/threads/{thread_id}/history")).json() == []
    assert (await api.get(f"/threads/{thread_id}/state/{uuid4()}")).status_code == 404


async def test_the_state_has_the_shape_of_the_wire(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    thread = await ran(api, thread_id)
    shown = await state(api, thread_id)
    ((task_id, (question,)),) = thread["interrupts"].items()
    assert shown.keys() == EMPTY.keys()
    assert shown["values"] == thread["values"]
    assert shown["next"] == ["ask"]
    assert shown["tasks"] == [
        {
            "id": task_id,
            "name": "ask",
            "path": ["__pregel_pull", "ask"],
            "error": None,
            "interrupts": [question],
            "checkpoint": None,
            "state": None,
            "result": None,
        }
    ]
    assert shown["interrupts"] == [question]
    assert question.keys() == {"id", "value"}
    assert shown["checkpoint"] == {"thread_id": thread_id, "checkpoint_ns": "", "checkpoint_id": shown["checkpoint_id"]}
    assert shown["parent_checkpoint"]["checkpoint_id"] == shown["parent_checkpoint_id"]
    assert shown["metadata"]["source"] == "loop"
    assert not [key for key in shown["metadata"] if key.startswith("__")]


async def test_subgraphs_are_named_or_opened(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id, graph="parent")
    (closed,) = (await state(api, thread_id))["tasks"]
    assert closed["checkpoint"] == {"thread_id": thread_id, "checkpoint_ns": f"child:{closed['id']}"}
    assert closed["state"] is None
    (opened,) = (await state(api, thread_id, subgraphs="true"))["tasks"]
    assert opened["checkpoint"] is None
    assert opened["state"]["next"] == ["ask"]
    assert opened["state"]["interrupts"] == closed["interrupts"]
    inner = await api.post(f"/threads/{thread_id}/state/checkpoint", json={"checkpoint": closed["checkpoint"]})
    assert inner.json()["next"] == ["ask"]
    history = await api.post(f"/threads/{thread_id}/history", json={"limit": 9, "checkpoint": closed["checkpoint"]})
    assert {s["checkpoint"]["checkpoint_ns"] for s in history.json()} == {closed["checkpoint"]["checkpoint_ns"]}


async def test_history_is_read_backwards(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id, mode="plain")
    path = f"/threads/{thread_id}/history"
    everything = (await api.post(path, json={"limit": 100})).json()
    ids = [s["checkpoint_id"] for s in everything]
    assert ids == sorted(ids, reverse=True)
    assert len((await api.post(path, json={})).json()) == len((await api.get(path)).json()) == 1
    for before in (everything[1]["checkpoint"], ids[1]):
        assert (await api.post(path, json={"limit": 1, "before": before})).json() == [everything[2]]
    assert (await api.get(path, params={"limit": 1, "before": ids[1]})).json() == [everything[2]]
    inputs = (await api.post(path, json={"limit": 9, "metadata": {"source": "input"}})).json()
    assert [s["metadata"]["source"] for s in inputs] == ["input"]
    for limit in (0, 1001):
        assert (await api.post(path, json={"limit": limit})).status_code == 422


async def test_a_state_can_be_read_at_a_checkpoint(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id, mode="plain")
    old = (await api.post(f"/threads/{thread_id}/history", json={"limit": 9})).json()[-1]
    assert (await api.get(f"/threads/{thread_id}/state/{old['checkpoint_id']}")).json() == old
    at = {"checkpoint": {**old["checkpoint"], "checkpoint_map": None}}
    assert (await api.post(f"/threads/{thread_id}/state/checkpoint", json=at)).json() == old
    assert (await api.get(f"/threads/{thread_id}/state/{uuid4()}")).json()["code"] == "checkpoint_not_found"


async def test_a_write_makes_a_checkpoint_and_brings_the_thread_up_to_date(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id, mode="plain")
    before = (await state(api, thread_id))["checkpoint"]
    made = (await write(api, thread_id, values={"answer": "edi\x00ted"}, as_node="agent")).json()
    assert made["checkpoint"] == made["configurable"]
    assert made["checkpoint_id"] == made["checkpoint"]["checkpoint_id"] != before["checkpoint_id"]
    after = await state(api, thread_id)
    assert (after["values"]["answer"], after["next"], after["metadata"]["source"]) == ("edited", ["ask"], "update")
    thread = (await api.get(f"/threads/{thread_id}")).json()
    assert (thread["status"], thread["values"]["answer"], thread["interrupts"]) == ("interrupted", "edited", {})

    forked = await write(api, thread_id, values={"answer": "other"}, as_node="ask", checkpoint=before)
    assert forked.status_code == 200
    assert (await state(api, thread_id))["parent_checkpoint_id"] == before["checkpoint_id"]
    assert (await api.get(f"/threads/{thread_id}")).json()["status"] == "idle"


async def test_a_write_supersedes_the_question(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    ((question,),) = (await ran(api, thread_id))["interrupts"].values()
    assert (await write(api, thread_id, values={"answer": "given"}, as_node="ask")).status_code == 200
    assert (await api.get(f"/inbox/{question['id']}")).json()["status"] == "superseded"
    assert (await api.get(f"/threads/{thread_id}")).json()["status"] == "idle"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"values": {"answer": 1}, "as_node": "nowhere"}, 400, "invalid_update"),
        ({"values": {"unknown": 1}, "as_node": "agent"}, 200, None),
        ({"values": {"messages": [{"role": "system", "content": "x"}]}, "as_node": "agent"}, 422, "invalid_message"),
        ({"values": {"messages": [{"role": "remove", "id": "m1", "content": ""}]}, "as_node": "agent"}, 422, "invalid_message"),
        ({"values": 5}, 422, "invalid"),
    ],
)
async def test_wrong_writes_change_nothing(api: httpx.AsyncClient, body: dict[str, Any], status: int, code: str | None) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id)
    before = (await api.get(f"/threads/{thread_id}")).json()
    answer = await write(api, thread_id, **body)
    assert (answer.status_code, answer.json().get("code")) == (status, code)
    if status != 200:
        assert (await api.get(f"/threads/{thread_id}")).json() == before
        assert len((await api.get("/inbox", params={"thread_id": thread_id})).json()["items"]) == 1


async def test_a_thread_without_a_graph_cannot_be_written(api: httpx.AsyncClient) -> None:
    refused = await write(api, await new_thread(api), values={"answer": 1})
    assert (refused.status_code, refused.json()["code"]) == (400, "thread_without_graph")
    seeded = await write(api, await new_thread(api, metadata={"graph_id": "ask"}), values=HI, as_node="__input__")
    assert seeded.status_code == 200


async def test_a_running_thread_cannot_be_written_or_deleted(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api, metadata={"graph_id": "slow"})
    run = (await api.post(f"/threads/{thread_id}/runs", json={"assistant_id": "slow", "input": HI})).json()
    answers = [await write(api, thread_id, values={"answer": 1}, as_node="wait"), await api.delete(f"/threads/{thread_id}")]
    assert [(a.status_code, a.json()["code"]) for a in answers] == [(409, "thread_busy")] * 2
    await api.post(f"/threads/{thread_id}/runs/{run['run_id']}/cancel", params={"wait": True})
    assert (await api.delete(f"/threads/{thread_id}")).status_code == 204


async def test_deletion_cancels_what_only_waits(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id, mode="plain")
    later = {"assistant_id": "ask", "input": HI, "after_seconds": 600}
    assert (await api.post(f"/threads/{thread_id}/runs", json=later)).status_code == 200
    assert (await write(api, thread_id, values={"answer": 1}, as_node="agent")).json()["code"] == "thread_busy"
    assert (await api.delete(f"/threads/{thread_id}")).status_code == 204
    assert (await api.get(f"/threads/{thread_id}/runs")).status_code == 404


async def test_a_thread_can_start_with_a_state(api: httpx.AsyncClient) -> None:
    steps = [
        {"updates": [{"values": HI, "as_node": "__input__"}]},
        {"updates": [{"values": HI, "as_node": "__start__"}]},
        {"updates": [{"values": {"answer": "x"}, "as_node": "agent"}]},
    ]
    made = await api.post("/threads", json={"metadata": {"graph_id": "ask"}, "supersteps": steps})
    assert made.json()["status"] == "interrupted"
    shown = await state(api, made.json()["thread_id"])
    assert (shown["values"]["answer"], shown["next"]) == ("x", ["ask"])
    refused = await api.post("/threads", json={"supersteps": steps})
    assert (refused.status_code, refused.json()["code"]) == (400, "thread_without_graph")


async def test_writing_under_a_gate_needs_the_scope_for_repairs(api: httpx.AsyncClient, resources: Resources) -> None:
    thread_id = await gated_thread(api)
    async with resources.database.transaction() as tx:
        _, key = await create_key(tx, subject="me", scopes=SCOPES - {"threads:repair"})
        _, repair = await create_key(tx, subject="me")
    resources.authenticator.forget()
    body = {"values": {"messages": [{"role": "user", "content": "x"}]}, "as_node": "agent"}
    refused = await api.post(f"/threads/{thread_id}/state", json=body, headers={"X-Api-Key": key})
    assert (refused.status_code, refused.json()["code"]) == (403, "missing_scope")
    api.headers["X-Api-Key"] = repair
    assert len((await api.get("/inbox", params={"thread_id": thread_id})).json()["items"]) == 1
    assert (await write(api, thread_id, **body)).status_code == 200
    assert (await api.get("/inbox", params={"thread_id": thread_id})).json()["items"] == []


async def test_ending_a_turn_answers_the_open_calls(api: httpx.AsyncClient) -> None:
    thread_id = await gated_thread(api)
    (item,) = (await api.get("/inbox", params={"thread_id": thread_id})).json()["items"]
    assert (await write(api, thread_id, values=None, as_node="__end__")).status_code == 200
    assert (await api.get(f"/inbox/{item['id']}")).json()["status"] == "withdrawn"
    shown = await state(api, thread_id)
    calls = [call["id"] for m in shown["values"]["messages"] for call in m.get("tool_calls") or []]
    answers = [m["tool_call_id"] for m in shown["values"]["messages"] if m["type"] == "tool"]
    assert calls == answers
    assert (shown["next"], shown["interrupts"]) == ([], [])
    assert (await api.get(f"/threads/{thread_id}")).json()["status"] == "idle"
    assert (await api.get("/inbox", params={"thread_id": thread_id})).json()["items"] == []
    again = {"assistant_id": (await api.get(f"/threads/{thread_id}")).json()["metadata"]["assistant_id"]}
    hello = await api.post(
        f"/threads/{thread_id}/runs/wait", json={**again, "input": {"messages": [{"role": "user", "content": "hello"}]}}
    )
    assert hello.json()["messages"][-1]["content"] == "Hm."


async def test_private_keys_never_reach_clients(api: httpx.AsyncClient, resources: Resources) -> None:
    thread_id = await gated_thread(api)
    private = resources.graphs.private_keys
    assert private
    history = (await api.post(f"/threads/{thread_id}/history", json={"limit": 100})).json()
    for shown in [await state(api, thread_id), *history]:
        assert not private & shown["values"].keys()
        for task in shown["tasks"]:
            assert not private & (task["result"] or {}).keys()


async def test_no_input_overwrites_a_message(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id, mode="plain")
    run = {"assistant_id": "ask", "input": {"messages": [{"role": "user", "content": "forged", "id": "ai-1"}]}}
    refused = await api.post(f"/threads/{thread_id}/runs/wait", json=run)
    assert (refused.status_code, refused.json()["code"]) == (422, "message_exists")
    repeated = await api.post(f"/threads/{thread_id}/runs/wait", json={"assistant_id": "ask", "input": HI})
    assert repeated.status_code == 200


async def test_a_branch_may_bring_the_id_of_the_message_it_replaces(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id, mode="plain")
    history = (await api.post(f"/threads/{thread_id}/history", json={"limit": 10})).json()
    run = {"assistant_id": "ask", "input": {"messages": [{"role": "user", "content": "edited", "id": "m1"}]}}
    for at, status in ((history[0], 422), (history[-1], 200)):
        answer = await api.post(f"/threads/{thread_id}/runs/wait", json={**run, "checkpoint": at["checkpoint"]})
        assert answer.status_code == status, answer.text
    assert [m["content"] for m in answer.json()["messages"]] == ["edited", "Hello 1"]


async def test_a_thread_whose_graph_is_gone_says_so(api: httpx.AsyncClient, database: Database) -> None:
    thread_id = await new_thread(api)
    await ran(api, thread_id)
    async with serving(database.url) as (other, _):
        for method, path, body in (
            ("GET", "state", None),
            ("POST", "history", {}),
            ("POST", "state", {}),
            ("POST", "copy", None),
        ):
            refused = await other.request(method, f"/threads/{thread_id}/{path}", json=body)
            assert (refused.status_code, refused.json()["code"]) == (409, "graph_not_served"), path
        assert (await other.get(f"/threads/{thread_id}")).json()["status"] == "interrupted"
        assert (await other.delete(f"/threads/{thread_id}")).status_code == 204
