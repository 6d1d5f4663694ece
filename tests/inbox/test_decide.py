"""Answering a question: what each verb does, what is refused, who wins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from desk import Desk, effects

CALL = {"name": "transfer", "args": {"to": "Ada", "amount": 1500}}
REQUEST = {"action": "transfer", "args": {"to": "Ada", "amount": 1500}}


def tool_messages(values: Any) -> list[tuple[str, str]]:
    return [(m["tool_call_id"], m["content"]) for m in values["messages"] if m["type"] == "tool"]


async def test_accept_runs_the_call_once(desk: Desk) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL))
    assert item["status"] == "pending"
    assert item["kind"] == "tool"
    assert item["tool"] == "transfer"
    assert item["action_request"] == REQUEST
    assert item["bound"] is True
    assert item["args_schema"]["properties"].keys() == {"to", "amount"}
    answered = await desk.answer(item, "accept")
    assert answered.status_code == 202
    body = answered.json()
    assert body["item"]["decision"]["type"] == "accept"
    assert answered.headers["location"] == f"/threads/{item['thread_id']}/runs/{body['run_id']}"
    values = await desk.join(item["thread_id"], body["run_id"])
    [(call_id, content)] = tool_messages(values)
    assert (call_id, content) == (item["tool_call_id"], "Transferred 1500 to Ada.")
    now = await desk.item(item["id"])
    assert now["status"] == "settled"
    assert now["outcome"]["tool_message_id"] == next(m["id"] for m in values["messages"] if m["type"] == "tool")
    assert now["resume_run_id"] == body["run_id"]
    late = await desk.answer(item, "ignore")
    assert late.status_code == 409
    assert late.json()["code"] == "already_decided"
    assert late.json()["item"]["decision"]["type"] == "accept"


async def test_edit_runs_other_arguments_and_says_so(desk: Desk) -> None:
    bank = effects()
    _, [item] = await desk.asked(await desk.agent(CALL))
    values = await desk.settle(item, "edit", {"action": "transfer", "args": {"to": "Ada", "amount": 900}})
    [(_, content)] = tool_messages(values)
    assert content.startswith("Transferred 900 to Ada.")
    assert "1500" in content
    assert bank() == [("Ada", 900)]
    now = await desk.item(item["id"])
    assert now["status"] == "settled"
    assert now["decision"]["diff"] == [{"path": "args.amount", "before": 1500, "after": 900}]
    assert now["action_request"] == REQUEST


async def test_response_and_ignore_run_nothing(desk: Desk) -> None:
    bank = effects()
    assistant = await desk.agent(CALL)
    _, [item] = await desk.asked(assistant)
    [(_, content)] = tool_messages(await desk.settle(item, "response", "Ask Ada first."))
    assert content == "Ask Ada first."
    _, [item] = await desk.asked(assistant)
    values = await desk.settle(item, "ignore")
    assert len(tool_messages(values)) == 1
    assert values["messages"][-1]["type"] == "tool"
    assert bank() == []
    assert (await desk.item(item["id"]))["outcome"]["state"] == "settled"


@pytest.mark.parametrize("verbs", [("accept", "accept", "accept"), ("response", "accept", "ignore")])
async def test_calls_of_one_message_are_carried_out_when_all_are_decided(desk: Desk, verbs: tuple[str, ...]) -> None:
    bank = effects()
    calls = [{"name": "transfer", "args": {"to": name, "amount": 1}} for name in ("A", "B", "C")]
    thread, items = await desk.asked(await desk.agent(*calls, {"name": "get_weather", "args": {"location": "Rome"}}))
    assert [i["action_request"]["args"]["to"] for i in items] == ["A", "B", "C"]
    values: Any = None
    for n, (item, verb) in enumerate(zip(items, verbs, strict=True), 1):
        assert bank() == []
        values = await desk.settle(item, verb, "No." if verb == "response" else None)
        statuses = [(await desk.item(i["id"]))["status"] for i in items]
        assert statuses == ["resuming"] * n + ["pending"] * (3 - n) if n < 3 else ["settled"] * 3
    assert sorted(bank()) == [(c["args"]["to"], 1) for c, verb in zip(calls, verbs, strict=True) if verb == "accept"]
    ids = [call_id for call_id, _ in tool_messages(values)]
    assert len(ids) == len(set(ids)) == 4
    assert await desk.items(thread) == []


async def test_of_fifty_different_answers_one_wins(desk: Desk) -> None:
    bank = effects()
    _, [item] = await desk.asked(await desk.agent(CALL))
    edits = [{"action": "transfer", "args": {"to": "Ada", "amount": n}} for n in range(25)]
    answers: list[tuple[str, Any]] = (
        [("edit", e) for e in edits] + [("response", f"no {n}") for n in range(24)] + [("accept", None)]
    )
    replies = await asyncio.gather(*(desk.answer(item, type_, args) for type_, args in answers))
    assert sorted(r.status_code for r in replies) == [202] + [409] * 49
    [winner] = [r.json() for r in replies if r.status_code == 202]
    losers = [r.json() for r in replies if r.status_code == 409]
    assert {loser["code"] for loser in losers} == {"already_decided"}
    assert all(loser["item"]["decision"] == winner["item"]["decision"] for loser in losers)
    await desk.join(item["thread_id"], winner["run_id"])
    decision = winner["item"]["decision"]
    expected = {"accept": [("Ada", 1500)], "response": []}.get(decision["type"])
    assert bank() == ([("Ada", decision["args"]["args"]["amount"])] if expected is None else expected)


async def test_a_bad_answer_changes_nothing_and_a_good_one_works_afterwards(desk: Desk) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL, review={"transfer": {"allow_ignore": False}}))
    for type_, args, path in [
        ("ignore", None, "type"),
        ("shrug", None, "type"),
        ("response", "", "args"),
        ("edit", {"action": "transfer", "args": {"to": "Ada", "amount": "900"}}, "args.args.amount"),
        ("edit", {"action": "transfer", "args": {"to": "Ada", "amount": 900, "x": 1}}, "args.args.x"),
    ]:
        refused = await desk.answer(item, type_, args)
        assert refused.status_code == 422, refused.text
        assert [e["path"] for e in refused.json()["errors"]] == [path]
    assert await desk.item(item["id"]) == item
    assert len((await desk.api.get(f"/inbox/{item['id']}/history")).json()) == 1
    values = await desk.settle(item, "edit", {"action": "transfer", "args": {"to": "A\0da", "amount": 900}})
    assert "Transferred 900 to Ada." in tool_messages(values)[0][1]


async def test_the_body_is_one_answer_with_known_fields(desk: Desk) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL))
    url = f"/inbox/{item['id']}/response"
    for body in ([], [{"type": "accept"}] * 2, {}, {"args": None}, {"type": "accept", "comment": "?"}, "accept", None, 5):
        refused = await desk.api.post(url, json=body)
        assert refused.status_code == 422, refused.text
        assert refused.json()["code"] == "invalid"
    assert (await desk.api.post(url, content=b"{")).status_code == 422
    assert (await desk.api.post(url, json=[{"type": "accept"}])).status_code == 202


async def test_what_was_not_read_cannot_be_answered(desk: Desk) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL))
    stale = await desk.answer(item, "accept", headers={"If-Match": '"7"'})
    assert (stale.status_code, stale.json()["code"], stale.json()["item"]) == (412, "stale_version", item)
    assert (await desk.answer(item, "accept", headers={"If-Match": "nonsense"})).status_code == 412
    url = f"/inbox/{item['id']}/response"
    changed = await desk.api.post(url, json={"type": "accept", "args_hash": "0" * 64})
    assert (changed.status_code, changed.json()["code"], changed.json()["item"]) == (409, "args_changed", item)
    got = await desk.api.get(f"/inbox/{item['interrupt_id']}")
    assert got.headers["etag"] == '"1"'
    done = await desk.api.post(
        url, json={"type": "accept", "args_hash": item["args_hash"]}, headers={"If-Match": f'W/"9", {got.headers["etag"]}'}
    )
    assert done.status_code == 202
    # The answer that was stored speaks louder than the version that was read.
    assert (await desk.answer(item, "accept", headers={"If-Match": '"1"'})).status_code == 409


async def test_unknown_items(desk: Desk) -> None:
    for ref in ("0190a8f0-3c1e-7d2a-9a51-6f0c2a9b1e44", "f" * 32, "x", "%00", "a%2Fb", "'; select 1", "9" * 150):
        for got in (
            await desk.api.get(f"/inbox/{ref}"),
            await desk.api.get(f"/inbox/{ref}/history"),
            await desk.api.post(f"/inbox/{ref}/response", json={"type": "accept"}),
        ):
            assert got.status_code == 404, got.text
            assert got.json()["code"] in ("item_not_found", "not_found")


async def test_a_repeat_with_the_same_key_is_the_same_answer(desk: Desk) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL))
    key = {"Idempotency-Key": "k1"}
    replies = await asyncio.gather(*(desk.answer(item, "accept", headers=key) for _ in range(8)))
    assert sorted(r.status_code for r in replies) == [200] * 7 + [202]
    assert len({r.json()["run_id"] for r in replies}) == 1
    await desk.join(item["thread_id"], replies[0].json()["run_id"])
    again = await desk.answer(item, "accept", headers=key)
    assert (again.status_code, again.json()["item"]["status"]) == (200, "settled")
    other = await desk.answer(item, "response", "no", headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    assert (await desk.answer(item, "accept", headers={"Idempotency-Key": "k2"})).status_code == 409


async def test_a_dry_run_stores_nothing(desk: Desk) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL))
    edit = {"action": "transfer", "args": {"to": "Ada", "amount": 1}}
    dry = await desk.answer(item, "edit", edit, params={"dry_run": "true"})
    assert dry.status_code == 200
    assert dry.json()["item"] == item
    assert dry.json()["run_id"] is None
    assert dry.json()["decision"]["diff"] == [{"path": "args.amount", "before": 1500, "after": 1}]
    assert (await desk.answer(item, "edit", {}, params={"dry_run": "true"})).status_code == 422
    assert await desk.item(item["id"]) == item


async def test_the_audit_tells_everything(desk: Desk) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL))
    await desk.settle(item, "response", "No.")
    records = (await desk.api.get(f"/inbox/{item['id']}/history")).json()
    assert [(r["event"], r["actor"], r["cause"]) for r in records] == [
        ("created", "system", "system"),
        ("decided", "local", "human"),
        ("resuming", "system", "system"),
        ("settled", "system", "system"),
    ]
    assert [r["item_version"] for r in records] == [1, 2, 3, 4]
    assert {r["args_hash"] for r in records} == {item["args_hash"]}
    assert records[1]["via"] == "inbox"
    assert records[1]["detail"]["decision"]["args"] == "No."
