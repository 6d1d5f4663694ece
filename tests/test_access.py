"""Every route × {no key, a stranger's key, a key without the scope}, from the application's own routes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from asgi import serving
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app.auth import SCOPES, _Require, create_key
from app.db.engine import Database
from app.main import create_app
from app.settings import Settings

OPEN = {("GET", "/ok"), ("GET", "/info")}
GATED = {
    "provider": "scripted",
    "params": {"rules": [{"if": "pay", "tool_calls": [{"name": "refund", "args": {"order_id": "1", "amount": 5}}]}]},
}


@dataclass(frozen=True)
class Route:
    """A route of the API, and the scope that it demands."""

    method: str
    path: str
    scope: str | None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def flattened(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, APIRoute]]:
    """All API routes, those of included routers too."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield prefix + route.path, route
        elif (inner := getattr(route, "original_router", None) or getattr(route, "router", None)) is not None:
            yield from flattened(inner.routes, prefix)


def scope_of(dependant: Dependant) -> str | None:
    for dependency in dependant.dependencies:
        if isinstance(dependency.call, _Require):
            return dependency.call.scope
    return None


def all_routes() -> list[Route]:
    app = create_app(Settings(), "postgresql://unused")
    return [
        Route(method, path, scope_of(route.dependant))
        for path, route in flattened(app.routes)
        for method in sorted(route.methods or ())
    ]


ROUTES = all_routes()
GUARDED = [route for route in ROUTES if (route.method, route.path) not in OPEN]


@dataclass
class House:
    """A server with keys, and things of one tenant in it."""

    api: httpx.AsyncClient
    keys: dict[str, str]
    things: dict[str, str]

    async def ask(self, route: Route, key: str | None) -> httpx.Response:
        """Send the emptiest request that names the tenant's things."""
        path = re.sub(r"\{(\w+)[^}]*\}", lambda m: self.things.get(m[1], "x"), route.path)
        headers = {"X-Api-Key": self.keys[key]} if key else {}
        body = {"json": self.body(route)} if route.method in ("POST", "PUT", "PATCH", "DELETE") else {}
        async with self.api.stream(route.method, path, headers=headers, **body) as response:
            if response.status_code >= 400 or "event-stream" not in response.headers.get("content-type", ""):
                await response.aread()
            return response

    def body(self, route: Route) -> dict[str, Any]:
        """A body that passes validation."""
        body: dict[str, Any] = {"namespace": ["a"], "key": "k", "value": {"a": 1}, "namespace_prefix": ["a"]}
        body |= {"assistant_id": self.things["assistant_id"], "graph_id": "react", "version": 1, "input": {}}
        body |= {"values": {}, "checkpoint": {"checkpoint_id": self.things["checkpoint_id"]}}
        return {"type": "ignore"} if route.path.startswith("/inbox") else body


@pytest_asyncio.fixture
async def house(database: Database) -> AsyncIterator[House]:
    async with serving(database.url, examples=False) as (api, resources):
        keys = {}
        async with database.transaction() as tx:
            for name, tenant, scopes in (("owner", "a", SCOPES), ("stranger", "b", SCOPES), ("bare", "a", ())):
                keys[name] = (await create_key(tx, tenant=tenant, subject=name, scopes=scopes))[1]
        resources.authenticator.forget()
        mine = {"headers": {"X-Api-Key": keys["owner"]}}
        config = {"configurable": {"model": GATED, "tools": ["refund"], "review": {"tools": {"refund": {}}}}}
        made = (await api.post("/assistants", json={"graph_id": "react", "config": config}, **mine)).json()
        thread = (await api.post("/threads", json={}, **mine)).json()["thread_id"]
        run = {"assistant_id": made["assistant_id"], "input": {"messages": [{"role": "user", "content": "pay"}]}}
        await api.post(f"/threads/{thread}/runs/wait", json=run, **mine)
        [ran] = (await api.get(f"/threads/{thread}/runs", **mine)).json()
        [item] = (await api.get("/inbox", **mine)).json()["items"]
        state = (await api.get(f"/threads/{thread}/state", **mine)).json()
        things = {
            "assistant_id": made["assistant_id"],
            "thread_id": thread,
            "run_id": ran["run_id"],
            "item_id": item["id"],
            "checkpoint_id": state["checkpoint"]["checkpoint_id"],
        }
        yield House(api, keys, things)


def test_every_route_but_the_health_routes_demands_a_scope() -> None:
    assert len(GUARDED) > 40
    assert [str(route) for route in GUARDED if route.scope not in SCOPES] == []


async def test_without_a_key_nothing_is_answered(house: House) -> None:
    for route in GUARDED:
        refused = await house.ask(route, None)
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated"), route
    for method, path in OPEN:
        assert (await house.api.request(method, path)).status_code == 200


async def test_a_key_without_the_scope_is_refused(house: House) -> None:
    for route in GUARDED:
        refused = await house.ask(route, "bare")
        assert (refused.status_code, refused.json()["code"]) == (403, "missing_scope"), route


async def test_what_belongs_to_somebody_else_does_not_exist(house: House) -> None:
    named = [route for route in GUARDED if "{" in route.path]
    assert named
    for route in named:
        refused = await house.ask(route, "stranger")
        assert refused.status_code == 404, (route, refused.status_code, refused.text)
        for thing in house.things.values():
            assert refused.json()["message"].count(thing) <= 1
    mine = {"headers": {"X-Api-Key": house.keys["owner"]}}
    assert len((await house.api.get("/inbox", **mine)).json()["items"]) == 1


async def test_lists_and_searches_of_a_stranger_are_empty(house: House) -> None:
    theirs = {"headers": {"X-Api-Key": house.keys["stranger"]}}
    assert (await house.api.get("/inbox", **theirs)).json()["items"] == []
    assert (await house.api.get("/inbox/counts", **theirs)).json()["total"] == 0
    assert (await house.api.post("/threads/search", json={}, **theirs)).json() == []
    found = (await house.api.post("/assistants/search", json={"limit": 1000}, **theirs)).json()
    assert house.things["assistant_id"] not in {a["assistant_id"] for a in found}
    assert (await house.api.post("/store/items/search", json={"namespace_prefix": []}, **theirs)).json()["items"] == []


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
async def test_without_keys_foreign_pages_are_refused(database: Database, headers: dict[str, str]) -> None:
    async with serving(database.url, examples=False) as (api, _):
        assert (await api.get("/inbox")).status_code == 200
        refused = await api.get("/inbox", headers=headers)
        assert refused.status_code == 403
        assert refused.json()["code"] in ("foreign_host", "foreign_origin")
