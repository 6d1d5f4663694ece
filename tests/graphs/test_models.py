"""Models of providers, against doubles that speak the real protocols over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.anthropic_double import AnthropicDouble
from fakes.openai_double import OpenAIDouble
from fakes.provider import Provider
from graphs.harness import ACCEPT, Agent, Agents, edit, paired, results
from langchain_core.messages import AIMessage, AIMessageChunk

from app.graphs.models import ModelError, ModelSpec, choose, scrub

SECRET = "sk-operator-secret-0123456789"


@pytest.fixture
async def openai() -> AsyncIterator[OpenAIDouble]:
    async with OpenAIDouble().serving() as double:
        yield double


@pytest.fixture
async def anthropic() -> AsyncIterator[AnthropicDouble]:
    async with AnthropicDouble().serving() as double:
        yield double


@pytest.fixture(params=["openai", "anthropic"])
async def provider(request: pytest.FixtureRequest, openai: OpenAIDouble, anthropic: AnthropicDouble) -> tuple[str, Provider]:
    return request.param, openai if request.param == "openai" else anthropic


def base_url(name: str, double: Provider) -> str:
    return f"{double.url}/v1" if name == "openai" else double.url


def agent_of(agents: Agents, name: str, double: Provider, params: dict[str, Any] | None = None, **more: Any) -> Agent:
    model = {
        "provider": name,
        "name": "model-x",
        "params": {"base_url": base_url(name, double), "max_retries": 0, **(params or {})},
    }
    return agents.agent(**{"model": model, "tools": ["refund", "audit"], "prompt": "Be kind.", **more})


async def streamed(agent: Agent, text: str) -> list[AIMessageChunk]:
    given = {"messages": [{"type": "human", "content": text}]}
    chunks: list[AIMessageChunk] = []
    async for message, _ in agent.graph.astream(given, agent.config(), stream_mode="messages"):  # type: ignore[arg-type, misc]
        if isinstance(message, AIMessageChunk):
            chunks.append(message)
    return chunks


async def test_a_turn_with_a_tool_call_streams(agents: Agents, provider: tuple[str, Provider]) -> None:
    name, double = provider
    agent = agent_of(agents, name, double)
    chunks = await streamed(agent, "please refund it")
    assert sum(1 for c in chunks if c.tool_call_chunks) > 3, "arguments come in pieces"
    assert sum(1 for c in chunks if c.text) > 3, "so does the text"
    messages = await agent.messages()
    call = next(m for m in messages if isinstance(m, AIMessage)).tool_calls[0]
    assert call["args"] == {"order_id": "12345", "amount": 1500}
    assert messages[-1].text == "It said: Refunded 1500.00 on order 12345."
    paired(messages)
    assert all(r.body["stream"] for r in double.requests)
    assert "Be kind." in str(double.requests[0].body)


async def test_a_turn_without_token_stream(agents: Agents, provider: tuple[str, Provider]) -> None:
    messages = await agent_of(agents, *provider).say("please refund it")
    assert messages[-1].text == "It said: Refunded 1500.00 on order 12345."


async def test_the_provider_sees_the_edit(agents: Agents, provider: tuple[str, Provider]) -> None:
    name, double = provider
    agent = agent_of(agents, name, double, review={"tools": {"refund": {}}})
    await streamed(agent, "please refund it")
    messages = await agent.decide({0: edit("refund", order_id="12345", amount=900)})
    assert "Refunded 900.00" in messages[-1].text
    sent = str(double.requests[-1].body["messages"])
    assert "900" in sent
    calls = [m for m in double.requests[-1].body["messages"] if m["role"] == "assistant"]
    assert "1500" not in str(calls)


async def test_call_ids_that_repeat_are_told_apart(agents: Agents, openai: OpenAIDouble) -> None:
    """The double names the first call of every answer `call_0`."""
    agent = agent_of(agents, "openai", openai, review={"tools": {"refund": {}}})
    await agent.say("refund it")
    await agent.decide({0: ACCEPT})
    await agent.say("refund it again, twice")
    assert len(await agent.questions()) == 2
    messages = await agent.decide({0: ACCEPT, 1: edit("refund", order_id="12345", amount=1)})
    paired(messages)
    assert [r.text.split(" on")[0] for r in results(messages)] == ["Refunded 1500.00", "Refunded 1500.00", "Refunded 1.00"]
    assert len({m.id for m in messages}) == len(messages), "and so are messages whose ids repeat"


async def test_arguments_that_are_not_json_are_answered(agents: Agents, openai: OpenAIDouble) -> None:
    openai.behave = "bad_json"
    agent = agent_of(agents, "openai", openai, review={"tools": {"refund": {}}})
    messages = await agent.say("refund it")
    paired(messages)
    (result,) = results(messages)
    assert result.status == "error"
    assert "not a JSON object" in result.text
    assert messages[-1].text.startswith("It said: Error")


@pytest.mark.parametrize(
    ("behave", "code"),
    [
        (401, "model_auth"),
        (403, "model_auth"),
        (429, "model_rate_limited"),
        (400, "model_error"),
        (404, "model_error"),
        (500, "model_unavailable"),
        (529, "model_unavailable"),
        ("stall", "model_timeout"),
        ("cut", "model_unavailable"),
        ("end_early", "model_unavailable"),
    ],
)
async def test_failures_are_clear_errors(
    agents: Agents, provider: tuple[str, Provider], behave: str | int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, double = provider
    double.behave = behave
    monkeypatch.setenv(f"{name.upper()}_API_KEY", SECRET)
    monkeypatch.setenv(f"{name.upper()}_BASE_URL", base_url(name, double))
    params = {"max_retries": 0, "timeout": 0.3 if behave == "stall" else 10.0}
    agent = agents.agent(model={"provider": name, "name": "model-x", "params": params}, tools=["refund"])
    with pytest.raises(ModelError) as caught:
        await streamed(agent, "please refund it")
    assert caught.value.code == code
    assert name in str(caught.value)
    assert SECRET not in str(caught.value)
    double.behave = "ok"
    assert (await agent.say("hello"))[-1].text == "You said: hello", "the thread goes on"


async def test_failures_are_retried(agents: Agents, openai: OpenAIDouble) -> None:
    openai.behave = 500
    agent = agent_of(agents, "openai", openai, {"max_retries": 1})
    with pytest.raises(ModelError):
        await agent.say("hello")
    assert len(openai.requests) == 2


async def test_an_address_in_an_assistant_never_gets_the_operators_secrets(
    agents: Agents, provider: tuple[str, Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, double = provider
    for variable in (
        "OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN",
        "LANGSMITH_API_KEY", "LANGSMITH_GATEWAY_API_KEY",
    ):  # fmt: skip
        monkeypatch.setenv(variable, SECRET)
    monkeypatch.setenv(f"{name.upper()}_CUSTOM_HEADERS", f"X-Company: {SECRET}\nX-Other: {SECRET}")
    assert (await agent_of(agents, name, double).say("hello"))[-1].text == "You said: hello"
    assert SECRET not in str(double.requests[0].headers)


async def test_the_operators_own_address_gets_the_operators_key(
    agents: Agents, provider: tuple[str, Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, double = provider
    monkeypatch.setenv(f"{name.upper()}_API_KEY", SECRET)
    monkeypatch.setenv(f"{name.upper()}_BASE_URL", base_url(name, double))
    assert (await agents.agent(model=f"{name}:model-x").say("hello"))[-1].text == "You said: hello"
    assert SECRET in str(double.requests[0].headers)


@pytest.mark.parametrize("name", ["openai", "anthropic"])
async def test_a_missing_key_is_an_error_of_the_run(agents: Agents, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = agents.graphs()
    graphs.validate("react", {"configurable": {"model": f"{name}:model-x"}})
    agent = agents.agent(graphs=graphs, model=f"{name}:model-x")
    with pytest.raises(ModelError, match=f"{name.upper()}_API_KEY is not set") as caught:
        await agent.say("hello")
    assert caught.value.code == "model_missing_key"


@pytest.mark.parametrize(
    ("default", "env", "chosen"),
    [
        (None, {}, ("scripted", None)),
        (None, {"OPENAI_API_KEY": "x"}, ("openai", "gpt-5.4-mini")),
        (None, {"ANTHROPIC_API_KEY": "x"}, ("anthropic", "claude-haiku-5-5")),
        (None, {"OPENAI_API_KEY": "x", "ANTHROPIC_API_KEY": "x"}, ("openai", "gpt-5.4-mini")),
        ("anthropic:big", {"OPENAI_API_KEY": "x"}, ("anthropic", "big")),
        ("scripted", {"OPENAI_API_KEY": "x"}, ("scripted", None)),
    ],
)
def test_the_default_model(default: str | None, env: dict[str, str], chosen: tuple[str, str | None]) -> None:
    spec = choose(ModelSpec(provider="default", params={"else": "hi"}), default, env)
    assert (spec.provider, spec.name) == chosen
    assert spec.params == ({"else": "hi"} if chosen[0] == "scripted" else {})


def test_secrets_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdefghij")
    assert scrub("no abcdefghij and no sk-proj-1234567 here") == "no *** and no *** here"
