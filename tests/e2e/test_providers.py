"""The real providers' path, end to end: a server process, its clients, and a double of the provider at the network."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fakes.anthropic_double import AnthropicDouble
from fakes.openai_double import OpenAIDouble
from fakes.provider import Provider
from processes import Server, Servers

KEY = "sk-test-0123456789"


@pytest_asyncio.fixture(scope="module")
async def openai() -> AsyncIterator[OpenAIDouble]:
    async with OpenAIDouble().serving() as double:
        yield double


@pytest_asyncio.fixture(scope="module")
async def anthropic() -> AsyncIterator[AnthropicDouble]:
    async with AnthropicDouble().serving() as double:
        yield double


@pytest_asyncio.fixture(scope="module")
async def server(
    servers: Servers, module_database_url: str, openai: OpenAIDouble, anthropic: AnthropicDouble
) -> AsyncIterator[Server]:
    """A server whose operator has keys, and sends the providers' traffic to the doubles."""
    environment = {
        "OPENAI_API_KEY": KEY,
        "OPENAI_BASE_URL": openai.url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": anthropic.url,
    }
    started = await servers.start(module_database_url, environment=environment)
    yield started
    await started.stop()


@pytest_asyncio.fixture
async def api(server: Server, openai: OpenAIDouble, anthropic: AnthropicDouble) -> AsyncIterator[httpx.AsyncClient]:
    for double in (openai, anthropic):
        double.behave = "ok"
        double.requests.clear()
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        yield client


async def agent(api: httpx.AsyncClient, model: str, **params: Any) -> str:
    spec = {"provider": model.split(":")[0], "name": model.split(":")[1], "params": {"max_retries": 0, **params}}
    config = {"configurable": {"model": spec, "tools": ["refund"], "review": {"tools": {"refund": {}}}}}
    made = await api.post("/assistants", json={"graph_id": "react", "config": config})
    assert made.status_code == 200, made.text
    return str(made.json()["assistant_id"])


async def thread(api: httpx.AsyncClient) -> str:
    return str((await api.post("/threads", json={})).json()["thread_id"])


def body(assistant: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"assistant_id": assistant, "input": {"messages": messages}, "stream_mode": ["messages-tuple", "values"]}


def events(stream: str) -> list[tuple[str, Any]]:
    blocks = [dict(line.split(": ", 1) for line in b.split("\r\n") if ": " in line) for b in stream.split("\r\n\r\n") if b]
    return [(b["event"], json.loads(b["data"])) for b in blocks if "event" in b]


MODELS = ["openai:gpt-double", "anthropic:claude-double"]


@pytest.mark.parametrize("model", MODELS)
async def test_tokens_and_calls_stream_and_a_gated_call_waits(
    api: httpx.AsyncClient, model: str, openai: OpenAIDouble, anthropic: AnthropicDouble
) -> None:
    assistant, on = await agent(api, model), await thread(api)
    asked = events((await api.post(f"/threads/{on}/runs/stream", json=body(assistant, "Please refund"))).text)
    chunks = [data[0] for name, data in asked if name == "messages" and data[0]["type"] == "AIMessageChunk"]
    assert len([c for c in chunks if c["tool_call_chunks"]]) > 1, "arguments come piece by piece"
    [item] = (await api.get("/inbox", params={"thread_id": on})).json()["items"]
    assert item["action_request"] == {"action": "refund", "args": {"order_id": "12345", "amount": 1500}}
    decided = (await api.post(f"/inbox/{item['id']}/response", json={"type": "accept"})).json()
    rest = await api.get(f"/threads/{on}/runs/{decided['run_id']}/stream", headers={"Last-Event-ID": "-1"})
    said = [data[0] for name, data in events(rest.text) if name == "messages"]
    tokens = [m["content"] for m in said if m["type"] == "AIMessageChunk" and m["content"]]
    assert len(tokens) > 1
    messages = (await api.get(f"/threads/{on}/state")).json()["values"]["messages"]
    assert [m["type"] for m in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    double: Provider = openai if model.startswith("openai") else anthropic
    assert len(double.requests) == 2
    assert KEY in json.dumps(double.requests[0].headers)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("behave", "code", "params"),
    [
        (401, "model_auth", {}),
        (429, "model_rate_limited", {}),
        (500, "model_unavailable", {}),
        ("stall", "model_timeout", {"timeout": 0.3}),
        ("cut", "model_unavailable", {}),
    ],
)
async def test_a_provider_that_fails_is_a_clear_error_of_the_run(
    api: httpx.AsyncClient,
    openai: OpenAIDouble,
    anthropic: AnthropicDouble,
    model: str,
    behave: str | int,
    code: str,
    params: dict[str, Any],
) -> None:
    openai.behave = anthropic.behave = behave
    assistant, on = await agent(api, model, **params), await thread(api)
    streamed = events((await api.post(f"/threads/{on}/runs/stream", json=body(assistant, "Hello"))).text)
    assert [name for name, _ in streamed][-2:] == ["error", "end"]
    error = streamed[-2][1]
    assert (error["error"], error["code"]) == ("ModelError", code)
    assert KEY not in json.dumps(streamed)
    waited = (await api.post(f"/threads/{on}/runs/wait", json=body(assistant, "Hello"))).json()
    assert waited["__error__"]["code"] == code
    runs = (await api.get(f"/threads/{on}/runs")).json()
    assert [(run["status"], run["error"]["code"]) for run in runs] == [("error", code)] * 2
    openai.behave = anthropic.behave = "ok"
    again = (await api.post(f"/threads/{on}/runs/wait", json=body(assistant, "Hello again"))).json()
    assert again["messages"][-1]["content"], "the thread goes on when the provider is back"


async def test_an_assistant_s_own_address_never_gets_the_operator_s_key(api: httpx.AsyncClient, openai: OpenAIDouble) -> None:
    assistant, on = await agent(api, "openai:gpt-double", base_url=openai.url), await thread(api)
    result = (await api.post(f"/threads/{on}/runs/wait", json=body(assistant, "Hello"))).json()
    assert KEY not in json.dumps([request.headers for request in openai.requests])
    assert "messages" in result or result["__error__"]["code"] == "model_missing_key"


async def test_a_missing_key_is_an_error_of_the_run(live_server: Server) -> None:
    async with httpx.AsyncClient(base_url=live_server.url, timeout=30) as api:
        assistant, on = await agent(api, "openai:gpt-double"), await thread(api)
        result = (await api.post(f"/threads/{on}/runs/wait", json=body(assistant, "Hello"))).json()
        assert result["__error__"]["code"] == "model_missing_key"
        assert "OPENAI_API_KEY" in result["__error__"]["message"]
