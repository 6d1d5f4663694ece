"""Cancelling, two servers on one database, takeovers: what was decided happens once, or is open again."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from asgi import serving
from desk import PROJECT, Desk, effects
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from app.db.engine import Database
from app.inbox.models import EffectPermit
from app.resources import Resources
from app.runs import queue
from app.runs.models import Run
from app.runs.queue import Claimant
from app.threads.models import Thread

CALL = {"name": "transfer", "args": {"to": "Ada", "amount": 1500}}
ACCEPT = {"type": "accept", "args": None}


@pytest_asyncio.fixture
async def idle(database: Database, desk: Desk) -> AsyncIterator[tuple[Desk, Resources]]:
    """A second server on the same database, which executes nothing."""
    async with serving(database.url, config=PROJECT, examples=False, max_concurrent_runs=0) as (api, resources):
        yield Desk(api), resources


async def close_slots(resources: Resources) -> None:
    """From now on this server claims nothing either."""
    resources.runs.claims.open = False


async def events(desk: Desk, item: dict[str, Any]) -> list[str]:
    return [r["event"] for r in (await desk.api.get(f"/inbox/{item['id']}/history")).json()]


async def test_a_cancelled_answer_that_was_not_delivered_leaves_the_question_open(
    desk: Desk, resources: Resources, idle: tuple[Desk, Resources], database: Database
) -> None:
    thread, [item] = await desk.asked(await desk.agent(CALL))
    await close_slots(resources)
    reviewer, _ = idle
    key = {"Idempotency-Key": "k"}
    decided = (await reviewer.answer(item, "accept", headers=key)).json()
    assert decided["item"]["status"] == "decided"
    assert decided["item"]["outcome"]["state"] == "queued"
    assert decided["item"]["resume_run_id"] == decided["run_id"]
    assert (await reviewer.api.get(f"/threads/{thread}")).json()["status"] == "busy"
    cancelled = await reviewer.api.post(f"/threads/{thread}/runs/{decided['run_id']}/cancel")
    assert cancelled.status_code == 202
    now = await reviewer.item(item["id"])
    assert (now["status"], now["version"], now["decision"], now["outcome"]) == ("pending", 3, None, None)
    assert await events(reviewer, item) == ["created", "decided", "revoked"]
    async with database.transaction() as tx:
        assert (await tx.scalars(select(EffectPermit))).all() == []
    assert (await reviewer.api.get(f"/threads/{thread}")).json()["status"] == "interrupted"
    again = await reviewer.answer(item, "accept", headers=key)
    assert (again.status_code, again.json()["code"]) == (409, "revoked")
    stale = await reviewer.answer(item, "accept", headers={"If-Match": '"1"'})
    assert stale.status_code == 412
    assert (await reviewer.answer(item, "response", "no", headers={"If-Match": '"3"'})).status_code == 202


async def test_answers_that_wait_go_together(
    desk: Desk, resources: Resources, idle: tuple[Desk, Resources], database: Database
) -> None:
    calls = [{"name": "transfer", "args": {"to": name, "amount": 1}} for name in "ABC"]
    thread, [a, b, c] = await desk.asked(await desk.agent(*calls))
    await close_slots(resources)
    reviewer, other = idle
    runs = {(await reviewer.answer(i, "accept")).json()["run_id"] for i in (a, b)}
    assert len(runs) == 1
    async with database.transaction() as tx:
        locked = await queue.lock_thread(tx, UUID(thread))
        assert locked is not None
        run = await queue.claim_next(tx, locked, Claimant("dead", 30), paused=True)
        assert run is not None
        first = await other.inbox.answers(tx, run)
    assert first == {i["interrupt_id"]: [ACCEPT] for i in (a, b)}
    late = (await reviewer.answer(c, "response", "no")).json()
    assert late["run_id"] not in runs
    async with database.transaction() as tx:
        await tx.execute(text("UPDATE runs SET lease_until = now() - interval '1 s' WHERE status = 'running'"))
        locked = await queue.lock_thread(tx, UUID(thread))
        assert locked is not None
        run = await queue.claim_next(tx, locked, Claimant("other", 30), paused=True)
        assert run is not None
        assert (str(run.id), run.epoch) == (runs.pop(), 2)
        repeated = await other.inbox.answers(tx, run)
    assert repeated == {**first, c["interrupt_id"]: [{"type": "response", "args": "no"}]}
    assert [(await reviewer.item(i["id"]))["status"] for i in (a, b, c)] == ["resuming"] * 3
    assert (await reviewer.item(c["id"]))["resume_run_id"] == str(run.id)


async def test_a_call_that_was_cut_off_has_an_unknown_outcome(desk: Desk) -> None:
    started = importlib.import_module("bank").STARTED
    started.clear()
    call = {"name": "hang", "args": {"name": "x"}}
    agent = await desk.agent(call, review={"hang": {}})
    thread, [item] = await desk.asked(agent)
    run = (await desk.answer(item, "accept")).json()["run_id"]
    async with asyncio.timeout(10):
        while not started:
            await asyncio.sleep(0.01)
    assert (await desk.api.post(f"/threads/{thread}/runs/{run}/cancel", params={"wait": "true"})).status_code in (200, 202)
    now = await desk.item(item["id"])
    assert (now["status"], now["outcome"]["state"]) == ("settled", "unknown_outcome")
    # Going on does not start the call again: the model is told that nobody knows.
    values = (await desk.run(thread, agent)).json()
    [told] = [m["content"] for m in values["messages"] if m["type"] == "tool"]
    assert "not known" in told
    assert started == ["x"]


async def test_answers_in_any_order_at_the_same_time(desk: Desk) -> None:
    bank = effects()
    calls = [{"name": "transfer", "args": {"to": name, "amount": 1}} for name in "ABCDE"]
    thread, items = await desk.asked(await desk.agent(*calls))
    replies = await asyncio.gather(*(desk.answer(i, "accept") for i in items))
    assert {r.status_code for r in replies} == {202}
    for run in {r.json()["run_id"] for r in replies}:
        await desk.join(thread, run)
    assert sorted(bank()) == [(n, 1) for n in "ABCDE"]
    assert {(await desk.item(i["id"]))["status"] for i in items} == {"settled"}


async def test_two_servers_give_one_answer(desk: Desk, database: Database) -> None:
    bank = effects()
    async with serving(database.url, config=PROJECT, examples=False) as (api, _):
        both = (desk, Desk(api))
        _, [item] = await desk.asked(await desk.agent(CALL))
        edits = [{"action": "transfer", "args": {"to": "Ada", "amount": n}} for n in range(50)]
        replies = await asyncio.gather(*(both[n % 2].answer(item, "edit", edit) for n, edit in enumerate(edits)))
        assert sorted(r.status_code for r in replies) == [202] + [409] * 49
        decisions = {json.dumps(r.json()["item"]["decision"], sort_keys=True) for r in replies}
        assert len(decisions) == 1
        [winner] = [r.json() for r in replies if r.status_code == 202]
        await desk.join(item["thread_id"], winner["run_id"])
        assert bank() == [("Ada", winner["item"]["decision"]["args"]["args"]["amount"])]


async def test_a_late_answer_by_id_never_reaches_the_next_question_of_the_node(desk: Desk, database: Database) -> None:
    """V15: two questions in one node, answers by id to the first, on two servers."""
    async with serving(database.url, config=PROJECT, examples=False) as (api, _):
        both = (desk, Desk(api))
        for _ in range(3):
            thread, [first] = await desk.asked("twice")
            answers = [
                both[n % 2].run(thread, "twice", command={"resume": {first["interrupt_id"]: f"answer-{n}"}}) for n in range(6)
            ]
            replies = await asyncio.gather(*answers)
            assert sorted(r.status_code for r in replies) == [200] + [409] * 5
            late = await both[1].run(thread, "twice", command={"resume": {first["interrupt_id"]: "late"}})
            assert late.status_code == 409
            [second] = await desk.items(thread)
            assert second["description"] == "second?"


async def test_a_deleted_thread_and_a_decision_at_the_same_time(desk: Desk) -> None:
    agent = await desk.agent(CALL)
    for _ in range(5):
        thread, [item] = await desk.asked(agent)
        deleted, answered = await asyncio.gather(desk.api.delete(f"/threads/{thread}"), desk.answer(item, "response", "no"))
        assert (deleted.status_code, answered.status_code) in {(204, 410), (409, 202), (204, 202)}
        if deleted.status_code == 409:
            await desk.join(thread, answered.json()["run_id"])
        assert (await desk.item(item["id"]))["status"] in ("withdrawn", "settled")


async def test_the_audit_cannot_be_changed(desk: Desk, database: Database) -> None:
    await desk.asked("ask", 1)
    for statement in ("UPDATE inbox_decisions SET actor = 'eve'", "DELETE FROM inbox_decisions"):
        with pytest.raises(DBAPIError, match="append-only"):
            async with database.transaction() as tx:
                await tx.execute(text(statement))


async def test_seen_is_written_once_and_makes_no_new_version(desk: Desk, resources: Resources) -> None:
    thread, [item] = await desk.asked(await desk.agent(CALL))
    await asyncio.gather(
        *(desk.api.get(f"/threads/{thread}/state") for _ in range(5)), *(desk.item(item["id"]) for _ in range(5))
    )
    async with resources.database.transaction() as tx:
        row = (await tx.execute(text("SELECT version, seen_by FROM inbox_items"))).one()
        assert (row.version, row.seen_by) == (1, ["local"])
        assert (await tx.get(Thread, UUID(thread))) is not None
        assert (await tx.get(Run, UUID(item["run_id"]))) is not None
