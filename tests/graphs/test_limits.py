"""Limits of one run: calls of the model and of tools, and the time of a call and of a step."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from graphs.harness import ACCEPT, Agent, Agents, paired, results, script
from langgraph.prebuilt import ToolRuntime

from app.errors import Invalid
from app.graphs.models import ModelError

AGAIN = {"after_tool": "peek", "tool_calls": [{"name": "peek", "args": {"amount": 1}}]}
ENDLESS = script(("peek", {"amount": 1}), rules=[AGAIN])


async def go(agent: Agent, run: str, text: str | None = "go") -> dict[str, Any]:
    given = {"messages": [{"type": "human", "content": text}]} if text else None
    return await agent.graph.ainvoke(given, agent.config(run_id=run), durability="sync")  # type: ignore[arg-type]


async def test_a_run_calls_the_model_so_often_and_no_more(agents: Agents) -> None:
    agent = agents.agent(model=ENDLESS, tools=["peek"], limits={"model_calls": 3})
    with pytest.raises(ModelError, match=r"as often as it may \(3 times\)") as caught:
        await go(agent, "a")
    assert caught.value.code == "model_call_limit"
    assert len(agents.effects) == 3
    with pytest.raises(ModelError):
        await go(agent, "a", None)  # taken over, it goes on counting
    assert len(agents.effects) == 3
    with pytest.raises(ModelError):
        await go(agent, "b")
    assert len(agents.effects) == 6, "another run counts anew"
    paired(await agent.messages())


async def test_calls_of_tools_beyond_the_limit_are_refused(agents: Agents) -> None:
    calls = [("pay", {"amount": n}) for n in (1, 2, 3)]
    agent = agents.agent(model=script(*calls), tools=["pay"], limits={"tool_calls": 2})
    for run in ("a", "b"):
        values = await go(agent, run)
        assert values.keys() == {"messages"}
        messages = await agent.messages()
        assert messages[-1].text == "All done.", "the model is told, and goes on"
        assert sorted(r.status for r in results(messages)[-3:]) == ["error", "success", "success"]
        paired(messages)
    assert [e[1]["amount"] for e in agents.effects] == [1, 2, 1, 2]
    refused = next(r for r in results(messages) if r.status == "error")
    assert refused.text.startswith("Error: pay was not run: this run has made all the tool calls that it may make (2).")


async def test_all_calls_of_a_message_may_be_beyond_the_limit(agents: Agents) -> None:
    agent = agents.agent(model=ENDLESS, tools=["peek"], limits={"tool_calls": 2, "model_calls": 5})
    with pytest.raises(ModelError):
        await go(agent, "a")
    assert len(agents.effects) == 2
    assert [r.status for r in results(await agent.messages())] == ["success"] * 2 + ["error"] * 3


async def test_nobody_is_asked_about_a_call_beyond_the_limit(agents: Agents) -> None:
    calls = [("pay", {"amount": n}) for n in (1, 2)]
    agent = agents.agent(model=script(*calls), tools=["pay"], limits={"tool_calls": 1}, review={"tools": {"pay": {}}})
    await agent.say()
    assert [q.value[0]["action_request"]["args"]["amount"] for q in await agent.questions()] == [1]
    messages = await agent.decide({0: ACCEPT})
    assert [e[1]["amount"] for e in agents.effects] == [1]
    assert messages[-1].text == "All done."
    paired(messages)


async def hang(x: int = 0) -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return ""


async def hang_injected(runtime: ToolRuntime[Any, Any]) -> str:
    """Never returns, and goes through ToolNode."""
    return await hang()


async def time_out(x: int = 0) -> str:
    """Has a timeout of its own."""
    raise TimeoutError("the bank did not answer")


@pytest.mark.parametrize("reviewed", [False, True], ids=["free", "gated"])
async def test_a_tool_that_takes_too_long_is_an_error(agents: Agents, reviewed: bool) -> None:
    graphs = agents.graphs()
    over = threading.Event()

    def hang_thread(x: int = 0) -> str:
        """Never returns."""
        over.wait()
        return ""

    tools = {"hang": hang, "hang_injected": hang_injected, "hang_thread": hang_thread, "time_out": time_out}
    for name, function in tools.items():
        graphs.tools.add(name, function)
    rules: dict[str, Any] = {"review": {"tools": {name: {} for name in tools}}} if reviewed else {}
    model = script(*((name, {}) for name in tools))
    agent = agents.agent(graphs=graphs, model=model, tools=list(tools), limits={"tool_timeout": 0.2}, **rules)
    messages = await agent.say()
    if reviewed:
        messages = await agent.decide(dict.fromkeys(range(4), ACCEPT))
        assert [p["receipt"]["status"] for p in await agent.permits()] == ["error"] * 4
    over.set()
    assert [r.text for r in results(messages)] == [
        "Error: hang timed out after 0.2 s.",
        "Error: hang_injected timed out after 0.2 s.",
        "Error: hang_thread timed out after 0.2 s.",
        "Error: TimeoutError: the bank did not answer",
    ]
    assert {r.status for r in results(messages)} == {"error"}
    assert messages[-1].text == "All done."


async def test_a_step_that_takes_too_long_ends_the_run(agents: Agents) -> None:
    graphs = agents.graphs()
    graphs.tools.add("hang", hang)
    agent = agents.agent(graphs=graphs, model=script(("hang", {})), tools=["hang"], limits={"step_timeout": 0.2})
    with pytest.raises(TimeoutError):
        await agent.say()
    assert (await agent.state()).next == ("tools",)


@pytest.mark.parametrize(
    ("limits", "path"),
    [
        ({"model_calls": 0}, "limits.model_calls"),
        ({"tool_calls": "5"}, "limits.tool_calls"),
        ({"tool_timeout": 0}, "limits.tool_timeout"),
        ({"step_timeout": -1}, "limits.step_timeout"),
        ({"calls": 1}, "limits.calls"),
    ],
)
async def test_limits_are_checked(agents: Agents, limits: dict[str, Any], path: str) -> None:
    with pytest.raises(Invalid) as caught:
        agents.graphs().validate("react", {"configurable": {"limits": limits}})
    assert [e["path"] for e in caught.value.extra["errors"]] == [f"config.configurable.{path}"]
