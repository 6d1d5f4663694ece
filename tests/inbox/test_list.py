"""Finding questions: filters, pages that stay stable, counts, and that other tenants see nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from desk import Desk

from app.auth import SCOPES, create_key
from app.resources import Resources

CALL = {"name": "transfer", "args": {"to": "Ada", "amount": 1500}}


async def listed(api: httpx.AsyncClient, **params: Any) -> list[str]:
    got = await api.get("/inbox", params=params)
    assert got.status_code == 200, got.text
    return [item["id"] for item in got.json()["items"]]


async def test_filters_and_counts(desk: Desk) -> None:
    agent = await desk.agent(
        CALL, {"name": "mixed", "args": {"to": {"street": "x"}, "parts": []}}, review={"transfer": {}, "mixed": {}}
    )
    thread, [transfer, mixed] = await desk.asked(agent)
    _, [question] = await desk.asked("ask", "Well?")
    await desk.settle(question, "response", "Well.")
    _, [raw] = await desk.asked("ask", {"x": 1})
    api = desk.api
    assert await listed(api) == [transfer["id"], mixed["id"], raw["id"]]
    assert await listed(api, tool="mixed") == [mixed["id"]]
    assert await listed(api, tool="mixed\0") == [mixed["id"]]
    assert await listed(api, thread_id=thread) == [transfer["id"], mixed["id"]]
    assert await listed(api, assistant_id=raw["assistant_id"]) == [raw["id"]]
    assert await listed(api, assistant_id=agent, tool="transfer") == [transfer["id"]]
    assert await listed(api, status="settled") == [question["id"]]
    assert await listed(api, status=["settled", "pending"], thread_id=question["thread_id"]) == [question["id"]]
    assert len(await listed(api, status="all")) == 4
    counts = (await api.get("/inbox/counts")).json()
    assert counts == {
        "total": 3,
        "by_tool": {"transfer": 1, "mixed": 1},
        "by_assistant": {agent: 2, raw["assistant_id"]: 1},
        "by_status": {"pending": 3, "settled": 1},
    }


@pytest.mark.parametrize(
    "params",
    [
        {"cursor": "x"},
        {"cursor": "MjAyNi0xMi0wMXwx"},
        {"cursor": "é"},
        {"limit": 0},
        {"limit": 201},
        {"status": "open"},
        {"thread_id": "x"},
        {"sort": "age"},
    ],
)
async def test_a_wrong_query_is_named(api: httpx.AsyncClient, params: dict[str, Any]) -> None:
    got = await api.get("/inbox", params=params)
    assert got.status_code == 422
    assert next(e["path"] for e in got.json()["errors"]).split(".")[0] == next(iter(params))


async def test_pages_are_stable_while_items_come_and_go(desk: Desk) -> None:
    items = [(await desk.asked("ask", n))[1][0] for n in range(9)]
    seen: list[str] = []
    cursor: str | None = None
    for turn in range(20):
        page = (await desk.api.get("/inbox", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        seen += [i["id"] for i in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        if turn == 0:  # one that was shown goes, one that was not goes, one comes
            await desk.settle(items[0], "response", 1)
            await desk.settle(items[5], "response", 1)
            items.append((await desk.asked("ask", "new"))[1][0])
    assert seen == [i["id"] for i in items if i is not items[5]]


async def test_a_foreign_inbox_is_empty(desk: Desk, api: httpx.AsyncClient, resources: Resources) -> None:
    _, [item] = await desk.asked(await desk.agent(CALL))
    async with resources.database.transaction() as tx:
        _, other = await create_key(tx, tenant="other", subject="eve")
        _, own = await create_key(tx, subject="alice")
        _, reader = await create_key(tx, subject="bob", scopes=SCOPES - {"inbox:decide"})
        _, none = await create_key(tx, subject="carl", scopes=SCOPES - {"inbox:read", "inbox:decide"})
    resources.authenticator.forget()
    accept = {"type": "accept"}
    api.headers["x-api-key"] = other
    assert await listed(api, status="all") == []
    assert (await api.get("/inbox/counts")).json()["by_status"] == {}
    for id_ in (item["id"], item["interrupt_id"]):
        assert (await api.get(f"/inbox/{id_}")).status_code == 404
        assert (await api.get(f"/inbox/{id_}/history")).status_code == 404
        refused = await api.post(f"/inbox/{id_}/response", json=accept)
        assert refused.status_code == 404
        assert "item" not in refused.json()
    api.headers["x-api-key"] = reader
    assert await listed(api) == [item["id"]]
    assert (await api.post(f"/inbox/{item['id']}/response", json=accept)).status_code == 403
    api.headers["x-api-key"] = none
    for path in ("/inbox", "/inbox/counts", "/inbox/stream", f"/inbox/{item['id']}", f"/inbox/{item['id']}/history"):
        assert (await api.get(path)).status_code == 403
    del api.headers["x-api-key"]
    assert (await api.get("/inbox")).status_code == 401
    api.headers["x-api-key"] = own
    decided = await api.post(f"/inbox/{item['id']}/response", json=accept)
    assert (decided.status_code, decided.json()["item"]["decision"]["by"]) == (202, "alice")
    await desk.join(item["thread_id"], decided.json()["run_id"])
