"""The store over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from asgi import serving

from app.db.engine import Database

ITEM = {"namespace": ["u", "1"], "key": "k", "value": {"a": 1}}


@pytest_asyncio.fixture
async def api(database: Database) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(database.url) as (client, _):
        yield client


async def test_items_have_the_shape_of_the_wire(api: httpx.AsyncClient) -> None:
    assert (await api.put("/store/items", json={**ITEM, "index": None, "ttl": None})).status_code == 204
    got = (await api.get("/store/items", params={"namespace": "u.1", "key": "k"})).json()
    assert got.keys() == {"namespace", "key", "value", "created_at", "updated_at"}
    assert {k: got[k] for k in ITEM} == ITEM
    assert (await api.get("/store/items", params={"namespace": ["u", "1"], "key": "k"})).json() == got
    assert (await api.get("/store/items", params={"namespace": "u.1", "key": "missing"})).json() is None

    for wanted in ({"a": 1}, {"a": {"$eq": 1}}, None):
        found = await api.post("/store/items/search", json={"namespace_prefix": ["u"], "filter": wanted, "limit": 10})
        assert found.json() == {"items": [{**got, "score": None}]}
    assert (await api.post("/store/items/search", json={"namespace_prefix": ["u"], "filter": {"a": 2}})).json() == {"items": []}
    for body in ({"prefix": ["u"], "max_depth": 2}, {"suffix": ["1"]}, {}):
        assert (await api.post("/store/namespaces", json=body)).json() == {"namespaces": [["u", "1"]]}

    for _ in range(2):
        gone = await api.request("DELETE", "/store/items", json={"namespace": ["u", "1"], "key": "k"})
        assert gone.status_code == 204
    assert (await api.get("/store/items", params={"namespace": "u.1", "key": "k"})).json() is None


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/store/items", {**ITEM, "namespace": ["u.x"]}),
        ("PUT", "/store/items", {**ITEM, "namespace": []}),
        ("PUT", "/store/items", {**ITEM, "namespace": [""]}),
        ("PUT", "/store/items", {**ITEM, "namespace": ["langgraph", "x"]}),
        ("PUT", "/store/items", {**ITEM, "namespace": ["a\x00"]}),
        ("PUT", "/store/items", {**ITEM, "namespace": ["a" * 2000]}),
        ("PUT", "/store/items", {**ITEM, "key": "k\x00"}),
        ("PUT", "/store/items", {**ITEM, "key": "k" * 2000}),
        ("PUT", "/store/items", {**ITEM, "value": "text"}),
        ("GET", "/store/items?namespace=u..1&key=k", None),
        ("GET", "/store/items?namespace=u.1&key=%00", None),
        ("DELETE", "/store/items", {"namespace": ["u.x"], "key": "k"}),
        ("POST", "/store/items/search", {"namespace_prefix": ["u.x"]}),
        ("POST", "/store/items/search", {"namespace_prefix": ["u"], "limit": 0}),
        ("POST", "/store/items/search", {"namespace_prefix": ["u"], "filter": {"a": {"$where": 1}}}),
        ("POST", "/store/namespaces", {"max_depth": 0}),
    ],
)
async def test_wrong_bodies_have_the_one_error_body(api: httpx.AsyncClient, method: str, path: str, body: Any) -> None:
    refused = await api.request(method, path, json=body)
    assert refused.status_code == 422, refused.text
    assert refused.json()["errors"][0].keys() == {"path", "message"}
    assert {"code", "message", "detail", "request_id"} <= refused.json().keys()


async def test_values_are_cleaned(api: httpx.AsyncClient) -> None:
    assert (await api.put("/store/items", json={**ITEM, "value": {"n": "x\x00y", "k\x00": 1}})).status_code == 204
    got = await api.get("/store/items", params={"namespace": "u.1", "key": "k"})
    assert got.json()["value"] == {"n": "xy", "k": 1}
