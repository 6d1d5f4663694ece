"""Threads over HTTP: rows, searches, metadata, deletion, copies; whose they are."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from asgi import HI, new_thread, ran, until
from sqlalchemy import select

from app.auth import create_key
from app.inbox.models import InboxItem
from app.resources import Resources

THREAD = "aaaaaaaa-1111-4111-8111-111111111111"


async def test_a_new_thread_has_the_shape_of_the_wire(api: httpx.AsyncClient) -> None:
    made = await api.post("/threads", json={"thread_id": THREAD, "metadata": {"owner": "me"}, "unknown": 1})
    body = made.json()
    times = {body.pop("created_at"), body.pop("updated_at"), body.pop("state_updated_at")}
    assert made.status_code == 200
    assert len(times) == 1
    assert times.pop().endswith("+00:00")
    assert body == {"thread_id": THREAD, "metadata": {"owner": "me"}, "status": "idle", "config": {}, "values": None}
    assert (await api.post("/threads")).status_code == 200


async def test_an_existing_id_is_a_conflict_or_the_same_thread(api: httpx.AsyncClient) -> None:
    first = (await api.post("/threads", json={"thread_id": THREAD, "metadata": {"a": 1}})).json()
    again = await api.post("/threads", json={"thread_id": THREAD})
    assert (again.status_code, again.json()["code"]) == (409, "thread_exists")
    same = await api.post("/threads", json={"thread_id": THREAD, "if_exists": "do_nothing", "metadata": {"b": 1}})
    assert same.json() == first


async def test_many_creations_of_one_id_make_one_thread(api: httpx.AsyncClient) -> None:
    body = {"thread_id": str(uuid4())}
    codes = [r.status_code for r in await asyncio.gather(*(api.post("/threads", json=body) for _ in range(10)))]
    assert sorted(codes) == [200] + [409] * 9


@pytest.mark.parametrize("method", ["get", "patch", "delete"])
async def test_wrong_and_unknown_ids_have_the_one_error_body(api: httpx.AsyncClient, method: str) -> None:
    body = {"json": {}} if method == "patch" else {}
    wrong = await api.request(method, "/threads/nope%00", **body)
    unknown = await api.request(method, f"/threads/{uuid4()}", **body)
    assert (wrong.status_code, unknown.status_code) == (422, 404)
    assert unknown.json()["code"] == "thread_not_found"
    for answer in (wrong, unknown):
        assert {"code", "message", "detail", "request_id"} <= answer.json().keys()


async def test_metadata_is_merged_and_cleaned(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api, metadata={"owner": "m\x00e"})
    merged = await api.patch(f"/threads/{thread_id}", json={"metadata": {"tag\x00": "x"}})
    assert merged.json()["metadata"] == {"owner": "me", "tag": "x"}
    minimal = await api.patch(f"/threads/{thread_id}", json={"metadata": {"n": 1}}, headers={"Prefer": "return=minimal"})
    assert (minimal.status_code, minimal.content) == (204, b"")


async def test_search_filters_sorts_selects_and_counts_truly(api: httpx.AsyncClient) -> None:
    ids = [await new_thread(api, metadata={"group": "g", "n": n}) for n in range(5)]
    await new_thread(api, metadata={"group": "other"})
    await api.patch(f"/threads/{ids[1]}", json={"metadata": {"touched": True}})

    page = await api.post("/threads/search", json={"metadata": {"group": "g"}, "limit": 2})
    assert [t["thread_id"] for t in page.json()] == [ids[1], ids[4]]
    assert (page.headers["x-pagination-total"], page.headers["x-pagination-next"]) == ("5", "2")

    last = await api.post(
        "/threads/search",
        json={"metadata": {"group": "g"}, "offset": 4, "sort_by": "created_at", "sort_order": "asc", "select": ["thread_id"]},
    )
    assert last.json() == [{"thread_id": ids[4]}]
    assert last.headers["x-pagination-total"] == "5"
    assert "x-pagination-next" not in last.headers

    some = await api.post("/threads/search", json={"ids": [ids[0], str(uuid4())]})
    assert [t["thread_id"] for t in some.json()] == [ids[0]]
    assert (await api.post("/threads/count", json={"metadata": {"group": "g"}})).json() == 5
    assert (await api.post("/threads/search", json={"values": {"mode": "x"}})).json() == []


@pytest.mark.parametrize(
    "body", [{"sort_by": "bogus"}, {"select": ["bogus"]}, {"limit": 2000}, {"limit": 0}, {"status": "x"}, {"ids": ["nope"]}]
)
async def test_wrong_searches_are_refused(api: httpx.AsyncClient, body: dict[str, Any]) -> None:
    refused = await api.post("/threads/search", json=body)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["path"].startswith(next(iter(body)))


async def test_a_paused_thread_shows_its_question(api: httpx.AsyncClient) -> None:
    thread = await ran(api, await new_thread(api))
    assert thread["status"] == "interrupted"
    ((task_id, (question,)),) = thread["interrupts"].items()
    assert UUID(task_id)
    assert question["value"] == {"question": "approve?", "options": ["yes", "no"]}
    assert thread["values"]["messages"][0]["content"] == "hi"
    assert thread["metadata"]["graph_id"] == "ask"

    found = await api.post(
        "/threads/search",
        json={"status": "interrupted", "metadata": {"graph_id": "ask"}, "select": ["thread_id", "status", "interrupts"]},
    )
    assert found.json() == [{k: thread[k] for k in ("thread_id", "status", "interrupts")}]
    by_values = await api.post("/threads/search", json={"values": {"mode": "ask"}, "select": ["thread_id"]})
    assert by_values.json() == [{"thread_id": thread["thread_id"]}]


async def test_reading_a_question_is_remembered(api: httpx.AsyncClient, resources: Resources) -> None:
    async def seen_by(thread_id: str) -> list[str]:
        async with resources.database.transaction() as tx:
            return (await tx.execute(select(InboxItem.seen_by).where(InboxItem.thread_id == UUID(thread_id)))).scalar_one()

    for method, path in (("GET", "/threads/{}"), ("GET", "/threads/{}/state"), ("POST", "/threads/search")):
        thread_id = await new_thread(api)
        body = {"assistant_id": "ask", "input": {**HI, "mode": "ask"}}
        assert (await api.post(f"/threads/{thread_id}/runs", json=body)).status_code == 200
        await until(api, thread_id, "interrupted")
        assert await seen_by(thread_id) == []
        await api.request(method, path.format(thread_id), json={} if method == "POST" else None)
        assert await seen_by(thread_id) == ["local"]


async def test_deletion_withdraws_questions_and_forgets_the_state(api: httpx.AsyncClient) -> None:
    thread_id = await new_thread(api)
    thread = await ran(api, thread_id)
    ((question,),) = thread["interrupts"].values()
    assert (await api.delete(f"/threads/{thread_id}")).status_code == 204
    assert (await api.delete(f"/threads/{thread_id}")).status_code == 404
    assert (await api.get(f"/inbox/{question['id']}")).json()["status"] == "withdrawn"
    await new_thread(api, thread_id=thread_id)
    assert (await api.get(f"/threads/{thread_id}/state")).json()["values"] == {}


async def test_a_copy_has_the_state_and_asks_anew(api: httpx.AsyncClient) -> None:
    source = await ran(api, await new_thread(api, metadata={"owner": "me"}))
    copied = await api.post(f"/threads/{source['thread_id']}/copy")
    copy = copied.json()
    assert copied.status_code == 200
    assert copy["thread_id"] != source["thread_id"]
    assert {k: copy[k] for k in ("metadata", "status", "values")} == {k: source[k] for k in ("metadata", "status", "values")}

    states = [(await api.get(f"/threads/{t['thread_id']}/state")).json() for t in (source, copy)]
    assert states[0]["values"] == states[1]["values"]
    assert states[1]["checkpoint"]["thread_id"] == copy["thread_id"]
    histories = [(await api.post(f"/threads/{t['thread_id']}/history", json={"limit": 10})).json() for t in (source, copy)]
    assert len(histories[0]) == len(histories[1]) > 1

    items = (await api.get("/inbox", params={"thread_id": copy["thread_id"]})).json()["items"]
    assert len(items) == 1
    assert items[0]["id"] != (await api.get("/inbox", params={"thread_id": source["thread_id"]})).json()["items"][0]["id"]
    assert (await api.post(f"/threads/{uuid4()}/copy")).status_code == 404


async def test_threads_belong_to_their_tenant(api: httpx.AsyncClient, resources: Resources) -> None:
    async with resources.database.transaction() as tx:
        _, mine = await create_key(tx, tenant="a", subject="me")
        _, theirs = await create_key(tx, tenant="b", subject="they")
    resources.authenticator.forget()
    me, they = {"X-Api-Key": mine}, {"X-Api-Key": theirs}
    made = await api.post("/threads", json={"thread_id": THREAD}, headers=me)
    assert made.status_code == 200
    for method, path, body in (
        ("GET", "", None),
        ("PATCH", "", {}),
        ("DELETE", "", None),
        ("POST", "/copy", None),
        ("GET", "/state", None),
        ("POST", "/state", {"values": {}}),
        ("POST", "/history", {}),
    ):
        answer = await api.request(method, f"/threads/{THREAD}{path}", json=body, headers=they)
        assert answer.status_code == 404, (method, path)
    assert (await api.post("/threads/search", json={"ids": [THREAD]}, headers=they)).json() == []
    assert (await api.post("/threads", json={"thread_id": THREAD, "if_exists": "do_nothing"}, headers=they)).status_code == 409
    assert (await api.get(f"/threads/{THREAD}", headers=me)).status_code == 200
