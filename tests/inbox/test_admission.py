"""What LangGraph's own clients may do on a thread that waits: resume by id, resume bare, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from asgi import serving
from desk import PROJECT, Desk, effects

from app.auth import SCOPES, create_key
from app.db.engine import Database
from app.resources import Resources

CALL = {"name": "transfer", "args": {"to": "Ada", "amount": 1500}}
ACCEPT = {"type": "accept", "args": None}
GO = {"messages": [{"role": "user", "content": "go"}]}


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


async def resume(desk: Desk, thread: str, assistant: str, value: Any, **body: Any) -> httpx.Response:
    return await desk.run(thread, assistant, command={"resume": value}, **body)


@pytest.mark.parametrize(
    "value", [[ACCEPT], ACCEPT, {"type": "accept"}, {"type": "accept", "args": {"action": "transfer", "args": CALL["args"]}}]
)
async def test_a_bare_answer_to_the_one_question_that_was_shown(desk: Desk, value: Any) -> None:
    bank, agent = effects(), await desk.agent(CALL)
    thread, [item] = await desk.asked(agent)
    done = await resume(desk, thread, agent, value)
    assert done.json()["messages"][-1]["content"] == "Done."
    assert bank() == [("Ada", 1500)]
    now = await desk.item(item["id"])
    assert (now["status"], now["decision"]["via"], now["decision"]["by"]) == ("settled", "run", "local")
    assert code(await resume(desk, thread, agent, value)) == (409, "nothing_pending")
    late = await resume(desk, thread, agent, {item["interrupt_id"]: ACCEPT})
    assert code(late) == (409, "already_decided")
    assert late.json()["item"]["id"] == item["id"]


async def test_a_resume_streams_the_run_that_carries_it(desk: Desk) -> None:
    agent = await desk.agent(CALL)
    thread, [item] = await desk.asked(agent)
    got = await desk.run(thread, agent, "stream", command={"resume": ACCEPT}, stream_mode="updates")
    assert got.status_code == 200
    assert "event: updates" in got.text
    assert (await desk.item(item["id"]))["links"]["resume_run"] == got.headers["content-location"]


async def test_an_id_map_answers_what_it_names(desk: Desk) -> None:
    bank = effects()
    calls = [{"name": "transfer", "args": {"to": name, "amount": 1}} for name in "ABC"]
    agent = await desk.agent(*calls)
    thread, [a, b, c] = await desk.asked(agent)
    ambiguous = await resume(desk, thread, agent, ACCEPT)
    assert code(ambiguous) == (409, "ambiguous_resume")
    assert [i["id"] for i in ambiguous.json()["items"]] == [a["id"], b["id"], c["id"]]
    bad = {a["interrupt_id"]: ACCEPT, b["interrupt_id"]: {"type": "edit", "args": {}}}
    assert (await resume(desk, thread, agent, bad)).status_code == 422
    assert len(await desk.items(thread)) == 3
    assert code(await resume(desk, thread, agent, {"f" * 32: ACCEPT})) == (409, "unknown_interrupt")
    twice = {a["interrupt_id"]: ACCEPT, a["id"]: ACCEPT}
    assert (await resume(desk, thread, agent, twice)).status_code == 422
    both = {a["interrupt_id"]: [ACCEPT], b["id"]: {"type": "respond", "args": "no"}}
    rest = (await resume(desk, thread, agent, both)).json()
    assert [i["id"] for i in rest["__interrupt__"]] == [c["interrupt_id"]]
    runs = (await desk.api.get(f"/threads/{thread}/runs")).json()
    assert len(runs) == 2, "one run carried both answers"
    last = await resume(desk, thread, agent, ACCEPT)  # only one is left, and it was shown
    assert last.json()["messages"][-1]["content"] == "Done."
    assert sorted(bank()) == [("A", 1), ("C", 1)]


async def test_a_bare_answer_never_reaches_the_next_question(desk: Desk) -> None:
    """V12: two reviewers approve the same question; the second approval must not land on the one after it."""
    for _ in range(5):
        thread, [first] = await desk.asked("row")
        replies = await asyncio.gather(*(resume(desk, thread, "row", f"yes-{n}") for n in range(6)))
        assert sorted(r.status_code for r in replies) == [200] + [409] * 5
        [second] = await desk.items(thread)
        assert second["description"] == "transfer 9999?"
        assert (await desk.item(first["id"]))["status"] == "settled"


async def test_a_question_must_have_been_delivered(desk: Desk) -> None:
    thread, [first] = await desk.asked("row")
    await desk.settle(first, "response", "yes")  # the inbox shows the next question to nobody
    refused = await resume(desk, thread, "row", "yes")
    assert code(refused) == (409, "not_delivered")
    [item] = refused.json()["items"]
    assert item["description"] == "transfer 9999?"
    await desk.api.get(f"/threads/{thread}/state")
    assert (await resume(desk, thread, "row", "yes")).json()["log"] == ["small=yes", "large=yes"]


async def test_the_same_call_again_is_answered_by_id_only(desk: Desk) -> None:
    agent = await desk.agent(CALL)
    thread, [first] = await desk.asked(agent)
    await resume(desk, thread, agent, ACCEPT)
    await desk.run(thread, agent, input=GO)
    [second] = await desk.items(thread)
    assert second["args_hash"] == first["args_hash"]
    assert code(await resume(desk, thread, agent, ACCEPT)) == (409, "answered_before")
    assert (await resume(desk, thread, agent, {second["interrupt_id"]: ACCEPT})).status_code == 200


@pytest.mark.parametrize(
    ("value", "status", "why"),
    [
        ({"type": "accept", "args": {"action": "transfer", "args": {"to": "Ada", "amount": 1}}}, 409, "args_changed"),
        ({"type": "edit", "args": {"action": "other", "args": {}}}, 409, "args_changed"),
        ({"type": "edit", "args": {"action": "transfer", "args": {"to": "Ada"}}}, 422, "invalid"),
        ("yes", 422, "invalid"),
        (None, 422, "invalid"),
        ([ACCEPT, ACCEPT], 422, "invalid"),
        ({"type": "shrug"}, 422, "invalid"),
    ],
)
async def test_a_wrong_answer_changes_nothing(desk: Desk, value: Any, status: int, why: str) -> None:
    agent = await desk.agent(CALL)
    thread, [item] = await desk.asked(agent)
    assert code(await resume(desk, thread, agent, value)) == (status, why)
    assert await desk.items(thread) == [item]


async def test_what_cannot_go_with_an_answer(desk: Desk) -> None:
    agent = await desk.agent(CALL)
    thread, [item] = await desk.asked(agent)
    assert (await resume(desk, thread, agent, ACCEPT, after_seconds=1)).status_code == 422
    both = await desk.run(thread, agent, command={"resume": ACCEPT, "goto": "tools"})
    assert (both.status_code, [e["path"] for e in both.json()["errors"]]) == (422, ["command"])
    stale = {"checkpoint": {"checkpoint_id": "1f000000-0000-6000-8000-000000000000"}}
    assert code(await resume(desk, thread, agent, ACCEPT, **stale)) == (409, "checkpoint_changed")
    head = (await desk.api.get(f"/threads/{thread}/state")).json()["checkpoint"]
    assert await desk.items(thread) == [item]
    assert (await resume(desk, thread, agent, ACCEPT, checkpoint=head)).status_code == 200


async def test_new_input_waits_for_the_answer(desk: Desk) -> None:
    agent = await desk.agent(CALL)
    thread, [item] = await desk.asked(agent)
    for body in (
        {"input": GO},
        {"input": None},
        {"input": GO, "multitask_strategy": "reject"},
        {"input": GO, "after_seconds": 5},
        {"input": GO, "checkpoint_id": "1f000000-0000-6000-8000-000000000000"},
        {"command": {"goto": "tools"}},
        {"command": {"update": {"messages": []}}},
    ):
        for how in ("wait", "stream", None):
            refused = await desk.run(thread, agent, how, **body)
            assert code(refused) == (409, "thread_waiting"), body
            assert [i["id"] for i in refused.json()["items"]] == [item["id"]]
    assert await desk.items(thread) == [item]
    await desk.settle(item, "accept")
    assert (await desk.run(thread, agent, input=GO)).status_code == 200


async def test_nothing_pending(desk: Desk) -> None:
    agent = await desk.agent(CALL)
    thread = await desk.thread()
    for value in (ACCEPT, "yes", {}, None):
        assert code(await resume(desk, thread, agent, value)) == (409, "nothing_pending")
    assert code(await resume(desk, thread, agent, {"f" * 32: ACCEPT})) == (409, "unknown_interrupt")
    assert (await desk.api.get(f"/threads/{thread}/runs")).json() == []


async def test_answering_needs_its_scope_on_every_route(desk: Desk, resources: Resources) -> None:
    agent = await desk.agent(CALL)
    thread, [item] = await desk.asked(agent)
    async with resources.database.transaction() as tx:
        _, key = await create_key(tx, subject="bot", scopes=SCOPES - {"inbox:decide"})
        _, full = await create_key(tx, subject="alice")
    resources.authenticator.forget()
    desk.api.headers["x-api-key"] = key
    for value in (ACCEPT, {item["interrupt_id"]: ACCEPT}):
        assert code(await resume(desk, thread, agent, value)) == (403, "missing_scope")
    desk.api.headers["x-api-key"] = full
    assert code(await resume(desk, thread, agent, ACCEPT)) == (409, "not_delivered")
    assert (await resume(desk, thread, agent, {item["interrupt_id"]: ACCEPT})).status_code == 200


async def test_a_strict_server_takes_no_bare_answers(database: Database) -> None:
    async with serving(database.url, config=PROJECT, examples=False, bare_resume="strict") as (api, _):
        desk = Desk(api)
        agent = await desk.agent(CALL)
        thread, [item] = await desk.asked(agent)
        assert code(await resume(desk, thread, agent, ACCEPT)) == (422, "bare_resume")
        assert (await resume(desk, thread, agent, {item["interrupt_id"]: ACCEPT})).status_code == 200


async def test_the_functional_dialect_is_understood(desk: Desk) -> None:
    thread, [item] = await desk.asked("functional")
    edit = {"action": "update", "data": {"amount": 7}}
    assert (await resume(desk, thread, "functional", edit)).json()["review"] == edit
    assert (await desk.item(item["id"]))["decision"]["type"] == "edit"
