"""Questions of every kind of graph: opened, answered in their own dialect, settled, closed."""

from __future__ import annotations

from typing import Any

import pytest
from desk import Desk, effects

from app.inbox.models import InboxItem
from app.inbox.questions import tool_message_id

CALL = {"name": "transfer", "args": {"to": "Ada", "amount": 1500}}
HUMAN = {
    "action_request": {"action": "mail", "args": {"to": "a@b.c"}},
    "config": {"allow_accept": True, "allow_edit": True, "allow_respond": True, "allow_ignore": True},
    "description": "Send it?",
}


async def test_a_free_answer_arrives_as_it_was_sent(desk: Desk) -> None:
    for answer in (None, False, "", 0, {}, [], {"d41d8cd98f00b204e9800998ecf8427e": 1}, {"a": [1.5, None]}, "x"):
        _, [item] = await desk.asked("ask", {"what": "anything"})
        assert (item["kind"], item["bound"], item["tool"], item["args_hash"]) == ("raw", False, None, None)
        values = await desk.settle(item, "response", answer)
        assert values["log"] == [{"answer": answer}, "after"]
        assert type(values["log"][0]["answer"]) is type(answer)
        assert (await desk.item(item["id"]))["status"] == "settled"


async def test_any_value_is_a_question(desk: Desk) -> None:
    for value in ("Well?", {"question": "Well?"}, None, 0, [], {}, "\0" * 3, [HUMAN, HUMAN]):
        _, [item] = await desk.asked("ask", value)
        assert item["kind"] == ("question" if value in ("Well?", {"question": "Well?"}) else "raw")
        refused = await desk.answer(item, "accept")
        assert refused.status_code == 422
        assert (await desk.settle(item, "response", 1))["log"][0] == {"answer": 1}


async def test_a_question_that_changed_is_another_question(desk: Desk) -> None:
    thread, items = await desk.asked("drifting")
    [moving] = [i for i in items if i["path"] == ["moving"]]
    [right] = [i for i in items if i["path"] == ["right"]]
    await desk.settle(right, "response", "r")
    [now] = await desk.items(thread)
    assert now["interrupt_id"] == moving["interrupt_id"]
    assert now["value"] != moving["value"]
    late = await desk.answer(moving, "response", "m")
    assert (late.status_code, late.json()["code"]) == (410, "superseded")
    by_interrupt = await desk.api.post(f"/inbox/{now['interrupt_id']}/response", json={"type": "response", "args": "m"})
    assert (by_interrupt.status_code, by_interrupt.json()["code"]) == (409, "ambiguous_id")
    assert sorted((await desk.settle(now, "response", "m"))["log"]) == ["m", "r"]


@pytest.mark.parametrize("shape", ["list", "dict"])
async def test_a_human_interrupt_of_another_graph(desk: Desk, shape: str) -> None:
    _, [item] = await desk.asked("ask", [HUMAN] if shape == "list" else HUMAN)
    assert (item["kind"], item["tool"], item["bound"], item["description"]) == ("tool", "mail", False, "Send it?")
    edit = {"action": "mail", "args": {"to": "x@y.z"}}
    values = await desk.settle(item, "edit", edit)
    response = {"type": "edit", "args": edit}
    assert values["log"][0] == {"answer": [response] if shape == "list" else response}


@pytest.mark.parametrize(
    ("type_", "args", "native"),
    [
        ("accept", None, {"action": "continue"}),
        ("edit", {"action": "charge", "args": {"amount": 6}}, {"action": "update", "data": {"amount": 6}}),
        ("response", "Too much.", {"action": "feedback", "data": "Too much."}),
    ],
)
async def test_the_functional_api(desk: Desk, type_: str, args: Any, native: Any) -> None:
    _, [item] = await desk.asked("functional")
    assert (item["tool"], item["description"], item["config"]["allow_ignore"]) == ("charge", "Is this correct?", False)
    assert (await desk.answer(item, "ignore")).status_code == 422
    assert (await desk.settle(item, type_, args))["review"] == native


async def test_a_question_of_a_subgraph(desk: Desk) -> None:
    _, [item] = await desk.asked("nested", "Deep?")
    assert item["path"] == ["inner"]
    assert (await desk.settle(item, "response", "yes"))["log"][0] == {"answer": "yes"}


async def test_two_questions_of_one_node(desk: Desk) -> None:
    thread, [first] = await desk.asked("twice")
    assert first["description"] == "first?"
    await desk.settle(first, "response", "1")
    [second] = await desk.items(thread)
    assert second["description"] == "second?"
    assert second["run_id"] == (await desk.item(first["id"]))["resume_run_id"]
    late = await desk.answer(first, "response", "late")
    assert (late.status_code, late.json()["code"]) == (409, "already_decided")
    by_interrupt = await desk.api.post(f"/inbox/{first['interrupt_id']}/response", json={"type": "response", "args": "late"})
    assert by_interrupt.status_code == 409
    assert (await desk.settle(second, "response", "2"))["log"] == ["1", "2"]


async def test_questions_of_parallel_nodes_are_answered_one_by_one(desk: Desk) -> None:
    thread, items = await desk.asked("parallel")
    left, right = sorted(items, key=lambda i: str(i["description"]))
    await desk.settle(left, "response", "l")
    assert (await desk.item(left["id"]))["status"] == "settled"
    assert [i["id"] for i in await desk.items(thread)] == [right["id"]]
    assert (await desk.settle(right, "response", "r"))["log"] == ["r"]
    assert (await desk.item(right["id"]))["status"] == "settled"


async def test_an_answer_that_breaks_its_node_is_a_failed_item(desk: Desk) -> None:
    thread, [item] = await desk.asked("picky")
    ended = await desk.settle(item, "response", "x")
    assert ended["__error__"]["message"] == "not a number: x"
    now = await desk.item(item["id"])
    assert (now["status"], now["outcome"]["state"]) == ("failed", "failed")
    assert now["outcome"]["error"]["message"] == "not a number: x"
    assert await desk.items(thread) == []
    again = await desk.answer(item, "response", 1)
    assert (again.status_code, again.json()["code"]) == (409, "already_decided")


async def test_a_run_that_fails_later_is_told_on_the_item(desk: Desk) -> None:
    _, [item] = await desk.asked("picky")
    await desk.settle(item, "response", 13)
    now = await desk.item(item["id"])
    assert (now["status"], now["outcome"]["error"]["message"]) == ("failed", "thirteen")


async def test_a_run_that_fails_after_the_call_leaves_the_item_settled(desk: Desk) -> None:
    bank = effects()
    _, [item] = await desk.asked(await desk.agent(CALL, recursion_limit=2))
    ended = await desk.settle(item, "accept")
    assert ended["__error__"]["code"] == "recursion_limit"
    now = await desk.item(item["id"])
    assert (now["status"], now["outcome"]["state"]) == ("settled", "settled")
    assert now["outcome"]["tool_message_id"]
    assert now["outcome"]["error"]["code"] == "recursion_limit"
    assert bank() == [("Ada", 1500)]


async def test_a_deleted_thread_withdraws_its_questions(desk: Desk) -> None:
    thread, [item] = await desk.asked(await desk.agent(CALL))
    assert (await desk.api.delete(f"/threads/{thread}")).status_code == 204
    late = await desk.answer(item, "accept")
    assert (late.status_code, late.json()["code"]) == (410, "withdrawn")
    assert late.json()["item"]["status"] == "withdrawn"
    assert (await desk.api.get(f"/inbox/{item['id']}/history")).json()[-1]["detail"]["reason"] == "thread_deleted"


async def test_a_copy_asks_anew_and_does_not_repeat_what_was_done(desk: Desk) -> None:
    bank = effects()
    thread, [item] = await desk.asked(await desk.agent(CALL))
    copy = (await desk.api.post(f"/threads/{thread}/copy")).json()["thread_id"]
    second = (await desk.api.post(f"/threads/{copy}/copy")).json()["thread_id"]
    [copied], [again] = await desk.items(copy), await desk.items(second)
    assert (copied["copied_from"], again["copied_from"]) == (thread, copy)
    assert copied["interrupt_id"] == item["interrupt_id"]
    ambiguous = await desk.api.post(f"/inbox/{item['interrupt_id']}/response", json={"type": "accept"})
    assert (ambiguous.status_code, ambiguous.json()["code"]) == (409, "ambiguous_id")
    assert len(ambiguous.json()["items"]) == 3
    await desk.settle(item, "accept")
    for one in (copied, again):
        refused = await desk.answer(one, "accept")
        assert (refused.status_code, refused.json()["code"]) == (409, "already_carried_out")
    await desk.settle(copied, "response", "Done already.")
    body = {"type": "accept", "allow_duplicate": True}
    answered = await desk.api.post(f"/inbox/{again['id']}/response", json=body)
    assert answered.status_code == 202
    await desk.join(second, answered.json()["run_id"])
    assert bank() == [("Ada", 1500)] * 2


async def test_a_written_state_supersedes_the_question(desk: Desk) -> None:
    thread, [item] = await desk.asked(await desk.agent(CALL))
    body = {"values": {"messages": [{"role": "user", "content": "Never mind."}]}}
    assert (await desk.api.post(f"/threads/{thread}/state", json=body)).status_code == 200
    late = await desk.answer(item, "accept")
    assert (late.status_code, late.json()["code"]) == (410, "superseded")


async def test_a_static_breakpoint_is_a_question(desk: Desk) -> None:
    thread, [item] = await stopped(desk)
    assert (item["kind"], item["path"]) == ("breakpoint", ["after"])
    assert [flag for flag, allowed in item["config"].items() if allowed] == ["allow_accept"]
    values = await desk.settle(item, "accept")
    assert values["log"][-1] == "after"
    assert (await desk.item(item["id"]))["status"] == "settled"
    assert (await desk.api.get(f"/threads/{thread}")).json()["status"] == "idle"


async def stopped(desk: Desk) -> tuple[str, list[dict[str, Any]]]:
    """A thread that stopped at a breakpoint."""
    thread = await desk.thread()
    await desk.run(thread, "ask", input={"value": "Well?"}, interrupt_before=["after"])
    [question] = await desk.items(thread)
    await desk.settle(question, "response", "yes")
    return thread, await desk.items(thread)


async def test_a_run_without_input_releases_the_breakpoint_that_it_was_shown(desk: Desk) -> None:
    thread = await desk.thread()
    await desk.run(thread, "ask", input={"value": "Well?"}, interrupt_before=["asking"])
    [item] = await desk.items(thread)
    assert item["kind"] == "breakpoint"
    refused = await desk.run(thread, "ask", input={"value": "Other?"})
    assert (refused.status_code, refused.json()["code"]) == (409, "thread_waiting")
    ran = await desk.run(thread, "ask")
    assert ran.json()["__interrupt__"][0]["value"] == "Well?"
    assert (await desk.item(item["id"]))["decision"]["via"] == "run"
    thread = await desk.thread()
    run = (await desk.run(thread, "ask", None, input={"value": "Well?"}, interrupt_before=["asking"])).json()
    await desk.join(thread, run["run_id"])
    unseen = await desk.run(thread, "ask")
    assert (unseen.status_code, unseen.json()["code"]) == (409, "thread_waiting")
    [item] = await desk.items(thread)
    checkpoint = item["value"]["breakpoint"]["checkpoint_id"]
    stale = await desk.run(thread, "ask", checkpoint_id="1f000000-0000-6000-8000-000000000000")
    assert (stale.status_code, stale.json()["code"]) == (409, "checkpoint_changed")
    assert (await desk.run(thread, "ask", checkpoint_id=checkpoint)).status_code == 200


def message(kind: str, id_: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": id_, **fields}


@pytest.mark.parametrize(
    ("message_id", "index", "found"), [("ai-1", 0, "t1"), ("ai-1", 1, "t2"), ("ai-2", 0, None), ("ai-9", 0, None)]
)
def test_call_ids_that_repeat_are_told_apart(message_id: str, index: int, found: str | None) -> None:
    calls = [{"id": "call_0"}, {"id": "call_0"}]
    values = {
        "messages": [
            message("ai", "ai-1", tool_calls=calls),
            message("tool", "t1", tool_call_id="call_0"),
            message("tool", "t2", tool_call_id="call_0"),
            message("ai", "ai-2", tool_calls=calls),
            message("ai", "ai-3", tool_calls=calls),
            message("tool", "t3", tool_call_id="call_0"),
        ]
    }
    item = InboxItem(message_id=message_id, call_index=index, tool_call_id="call_0")
    assert tool_message_id(values, item) == found
    assert tool_message_id(None, item) is None
    assert tool_message_id({"messages": "?"}, item) is None
