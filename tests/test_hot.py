"""The busiest routes have a way of their own. It must be no other route: same scope, same body, same errors."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx
import pytest
from asgi import HI, new_thread, serving
from test_access import flattened, scope_of

from app.db.engine import Database
from app.hot import HOT
from app.main import create_app
from app.runs.schemas import RunCreate
from app.settings import Settings
from app.threads.schemas import ThreadCreate

THREAD = "0190a8f0-3c1e-7d2a-9a51-6f0c2a9b1e44"


def test_each_is_a_route_of_the_application_with_the_same_scope_and_body() -> None:
    app = create_app(Settings(), "postgresql://unused")
    routes = {path.replace("{thread_id}", THREAD): r for path, r in flattened(app.routes) if "POST" in (r.methods or ())}
    for hot in HOT:
        [route] = [r for path, r in routes.items() if hot.path.fullmatch(path)]
        assert scope_of(route.dependant) == hot.scope
        [body] = route.dependant.body_params
        assert hot.body in (body.field_info.annotation, *getattr(body.field_info.annotation, "__args__", ()))
    assert {hot.body for hot in HOT} == {ThreadCreate, RunCreate}


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"content": b"{"}, 422, "invalid_json"),
        ({"content": b"\xff"}, 400, "bad_request"),
        ({"content": b"[]"}, 422, "invalid"),
        ({"content": b""}, 422, "invalid"),
        ({"json": {}}, 422, "invalid"),
        ({"json": {"assistant_id": "weather", "stream_mode": "nonsense"}}, 422, "invalid"),
        ({"json": {"assistant_id": "weather", "input": HI, "webhook": 1}}, 422, "invalid"),
        ({"json": {"assistant_id": "nobody", "input": HI}}, 422, "invalid"),
        ({"json": {"assistant_id": str(uuid4()), "input": HI}}, 404, "assistant_not_found"),
        ({"json": {"assistant_id": "weather", "input": HI}}, 404, "thread_not_found"),
    ],
)
async def test_what_is_wrong_is_told_as_on_every_route(
    database: Database, sent: dict[str, Any], status: int, code: str
) -> None:
    async with serving(database.url) as (api, _):
        for how in ("stream", "wait"):
            headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
            answer = await api.post(f"/threads/{uuid4()}/runs/{how}", headers=headers, **sent)
            assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
            assert answer.json()["request_id"] == answer.headers["x-request-id"] == "mine"


async def test_a_body_that_is_too_large_is_refused(database: Database) -> None:
    async with serving(database.url, max_body_bytes=1024) as (api, _):
        answer = await api.post("/threads", json={"metadata": {"long": "x" * 2000}})
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


async def test_a_browser_is_told_where_the_run_is(database: Database) -> None:
    async with serving(database.url) as (api, _):
        thread = await new_thread(api)
        body = {"assistant_id": "weather", "input": HI}
        origin = {"Origin": "http://localhost:3000"}
        answer = await api.post(f"/threads/{thread}/runs/stream", json=body, headers=origin)
        assert answer.headers["access-control-allow-origin"]
        assert "Location" in answer.headers["access-control-expose-headers"]
        assert answer.headers["location"].startswith(f"/threads/{thread}/runs/")
        foreign = await api.post("/threads", json={}, headers={"Origin": "http://elsewhere.example"})
        assert (foreign.status_code, foreign.json()["code"]) == (403, "foreign_origin")


async def test_a_thread_shows_the_same_whichever_way_it_was_made(database: Database) -> None:
    async with serving(database.url) as (api, _):
        made: httpx.Response = await api.post("/threads", json={"metadata": {"a": ["\u00e9", 1]}})
        body = made.json()
        assert body == (await api.get(f"/threads/{body['thread_id']}")).json()
        named = (await api.post("/threads", json={"thread_id": str(uuid4()), "metadata": {"a": 1}})).json()
        assert named.keys() == body.keys()
        assert (await api.post("/threads")).status_code == 200
