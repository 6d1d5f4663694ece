"""There is one error body. Every source of an error is made to speak here, and has to use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from asgi import new_thread, serving

from app.db.engine import Database

NOBODY = "00000000-0000-4000-8000-000000000001"
LIMIT = 4096


@pytest_asyncio.fixture
async def api(database: Database) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(database.url, max_body_bytes=LIMIT) as (client, _):
        yield client


def assert_error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The response is an error as all are: `{code, message, detail, request_id}`, and the id is in a header too."""
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["code"]) == (status, code), response.text
    assert body["message"] == body["detail"]
    assert body["message"].endswith((".", "]", ")")) or ":" in body["message"], "a sentence that says what to do"
    assert body["request_id"] == response.headers["x-request-id"]
    for error in body.get("errors", ()):
        assert error.keys() == {"path", "message"}
    return body


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("DELETE", "/threads", None, 405, "method_not_allowed"),
        ("GET", "/threads/not-a-uuid", None, 422, "invalid"),
        ("GET", f"/threads/{NOBODY}", None, 404, "thread_not_found"),
        ("GET", f"/threads/{NOBODY}/state", None, 404, "thread_not_found"),
        ("GET", f"/threads/{NOBODY}/runs", None, 404, "thread_not_found"),
        ("GET", f"/threads/{NOBODY}/runs/{NOBODY}", None, 404, "run_not_found"),
        ("GET", f"/threads/{NOBODY}/runs/{NOBODY}/stream", None, 404, "run_not_found"),
        ("GET", f"/threads/{NOBODY}/runs/{NOBODY}/join", None, 404, "run_not_found"),
        ("POST", f"/threads/{NOBODY}/runs/wait", {"assistant_id": "weather"}, 404, "thread_not_found"),
        ("POST", f"/threads/{NOBODY}/runs/wait", {}, 422, "invalid"),
        ("GET", f"/assistants/{NOBODY}", None, 404, "assistant_not_found"),
        ("POST", "/assistants", {"graph_id": "no such graph"}, 404, "graph_not_found"),
        ("GET", f"/inbox/{NOBODY}", None, 404, "item_not_found"),
        ("GET", "/inbox?cursor=%00", None, 422, "invalid_cursor"),
        ("GET", "/inbox?limit=0", None, 422, "invalid"),
        ("POST", f"/inbox/{NOBODY}/response", {"type": "accept", "unknown": 1}, 422, "invalid"),
        ("POST", f"/inbox/{NOBODY}/response", {"type": "perhaps"}, 422, "invalid"),
        ("PUT", "/store/items", {"namespace": ["a.b"], "key": "k", "value": {}}, 422, "invalid"),
    ],
)
async def test_requests_that_cannot_be_served(
    api: httpx.AsyncClient, method: str, path: str, json: Any, status: int, code: str
) -> None:
    assert_error(await api.request(method, path, json=json), status, code)


async def test_wrong_fields_are_named(api: httpx.AsyncClient) -> None:
    model = {"provider": "scripted", "params": {"rules": []}}
    config = {"configurable": {"model": model, "tools": ["refund"], "review": {"tools": {"refund": {"when": "amount >"}}}}}
    body = assert_error(await api.post("/assistants", json={"graph_id": "react", "config": config}), 422, "invalid_config")
    assert [e["path"] for e in body["errors"]] == ["config.configurable.review.tools.refund.when"]


async def test_a_body_that_is_not_json(api: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    assert_error(await api.post("/threads", content=b'{"metadata": ', headers=headers), 422, "invalid_json")
    assert_error(await api.post("/threads", content=b"\xff\xfe", headers=headers), 422, "invalid_json")


async def test_a_body_that_is_too_large_by_its_length_or_as_it_comes(api: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(LIMIT):
            yield b" " * 100

    assert_error(await api.post("/threads", content=b" " * (LIMIT + 1)), 413, "too_large")
    assert_error(await api.post("/threads", content=endless()), 413, "too_large")
    assert (await api.post("/threads", json={})).status_code == 200


async def test_a_client_s_request_id_is_kept_if_it_is_harmless(api: httpx.AsyncClient) -> None:
    named = await api.get(f"/threads/{NOBODY}", headers={"X-Request-Id": "abc-1.2_3"})
    assert assert_error(named, 404, "thread_not_found")["request_id"] == "abc-1.2_3"
    odd = await api.get(f"/threads/{NOBODY}", headers={"X-Request-Id": "a b<script>"})
    assert "script" not in assert_error(odd, 404, "thread_not_found")["request_id"]


async def test_a_run_that_fails_tells_the_same_in_its_stream_its_result_and_its_row(api: httpx.AsyncClient) -> None:
    rules = [{"tool": "x"}]
    assert_error(
        await api.post(
            "/assistants",
            json={
                "graph_id": "react",
                "config": {"configurable": {"model": {"provider": "scripted", "params": {"rules": rules}}}},
            },
        ),
        422,
        "invalid_config",
    )
    loop = [{"if": "go", "tool_calls": [{"name": "get_weather", "args": {"location": "Rome"}}]}]
    loop.append({"after_tool": "get_weather", "tool_calls": [{"name": "get_weather", "args": {"location": "Rome"}}]})  # type: ignore[dict-item]
    config = {"configurable": {"model": {"provider": "scripted", "params": {"rules": loop}}, "tools": ["get_weather"]}}
    made = await api.post("/assistants", json={"graph_id": "react", "config": {**config, "recursion_limit": 5}})
    body = {"assistant_id": made.json()["assistant_id"], "input": {"messages": [{"role": "user", "content": "go"}]}}
    thread = await new_thread(api)
    stream = (await api.post(f"/threads/{thread}/runs/stream", json=body)).text
    assert "event: error\r\n" in stream
    assert '"code":"recursion_limit"' in stream
    assert stream.rstrip().splitlines()[-2].startswith('data: {"run_id"')
    result = (await api.post(f"/threads/{thread}/runs/wait", json=body)).json()
    assert result["__error__"]["error"] == "GraphRecursionError"
    [last, *_] = (await api.get(f"/threads/{thread}/runs")).json()
    assert (last["status"], last["error"]) == ("error", result["__error__"])
    shown = (await api.get(f"/threads/{thread}")).json()
    assert (shown["status"], shown["error"]["code"]) == ("error", "recursion_limit")


async def test_every_status_that_occurs_is_documented(api: httpx.AsyncClient) -> None:
    document = (await api.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path not in ("/ok", "/info"):
                assert {"401", "403", "422"} <= operation["responses"].keys(), (method, path)
            assert operation["summary"], (method, path)
            assert operation.get("description"), (method, path)
