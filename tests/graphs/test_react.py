"""The ReAct loop: calls without review, errors, ids, prompts and what clients see."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from graphs.harness import ACCEPT, Agents, edit, paired, results, script
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command

from app.graphs.calls import settled, storable
from app.graphs.prompts import PromptError, for_provider

HELLO = {"provider": "scripted", "params": {"else": "Hello."}}


async def test_an_agent_without_tools_answers(agents: Agents) -> None:
    messages = await agents.agent(model=HELLO, name="desk").say("hi")
    assert [m.text for m in messages] == ["hi", "Hello."]
    assert messages[-1].name == "desk"


async def test_free_calls_run_together(agents: Agents) -> None:
    graphs = agents.graphs()
    barrier = asyncio.Barrier(3)

    @tool
    async def meet(name: str) -> str:
        """Waits for the others."""
        async with asyncio.timeout(5):
            await barrier.wait()
        return f"met {name}"

    graphs.tools.add("meet", meet)
    calls = [("meet", {"name": n}) for n in "abc"]
    messages = await agents.agent(graphs=graphs, model=script(*calls), tools=["meet"]).say()
    assert [r.text for r in results(messages)] == ["met a", "met b", "met c"], "in the order of the calls"
    paired(messages)


async def test_a_sync_tool_does_not_block_the_loop(agents: Agents) -> None:
    graphs = agents.graphs()
    seen: list[bool] = []

    def slow(seconds: float) -> str:
        """Blocks its thread."""
        seen.append(threading.current_thread() is threading.main_thread())
        time.sleep(seconds)
        return "slept"

    graphs.tools.add("slow", slow)
    agent = agents.agent(graphs=graphs, model=script(("slow", {"seconds": 0.3})), tools=["slow"])
    turn = asyncio.create_task(agent.say())
    longest = 0.0
    while not turn.done():
        start = time.perf_counter()
        await asyncio.sleep(0.01)
        longest = max(longest, time.perf_counter() - start)
    assert results(await turn)[0].text == "slept"
    assert seen == [False]
    assert longest < 0.25


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("pay", {"amount": "lots"}), "its arguments are not valid (amount: "),
        (("pay", {}), "amount: Field required"),
        (("nothing", {"amount": 1}), "there is no tool 'nothing'. Use one of: pay, fail"),
        (("refund", {"order_id": "1", "amount": 1}), "there is no tool 'refund'"),
        (("fail", {}), "Error: ValueError: it failed"),
    ],
)
@pytest.mark.parametrize("reviewed", [False, True], ids=["free", "gated"])
async def test_a_call_that_cannot_run_has_an_error_as_its_result(
    agents: Agents, call: tuple[str, dict[str, Any]], text: str, reviewed: bool
) -> None:
    graphs = agents.graphs()

    @tool
    async def fail() -> str:
        """Always fails."""
        raise ValueError("it failed")

    graphs.tools.add("fail", fail)
    rules: dict[str, Any] = {"review": {"tools": {"pay": {}}}} if reviewed else {}
    agent = agents.agent(graphs=graphs, model=script(call), tools=["pay", "fail"], **rules)
    messages = await agent.say()
    (result,) = results(messages)
    assert result.status == "error"
    assert text in result.text
    assert messages[-1].text == "All done.", "the model is told, no human is asked"
    assert agents.effects == []
    paired(messages)


async def test_a_failing_call_does_not_hide_its_siblings(agents: Agents) -> None:
    messages = await agents.agent(model=script(("pay", {"amount": "x"}), ("pay", {"amount": 1})), tools=["pay"]).say()
    assert [r.status for r in results(messages)] == ["error", "success"]
    paired(messages)


@pytest.mark.parametrize("reviewed", [False, True], ids=["free", "gated"])
async def test_a_tool_that_writes_the_state_by_itself(agents: Agents, reviewed: bool) -> None:
    graphs = agents.graphs()

    @tool
    async def note(text: str, runtime: ToolRuntime[Any, Any]) -> Any:
        """Returns commands."""
        told = ToolMessage([{"type": "text", "text": text}], tool_call_id=runtime.tool_call_id)
        return [Command(update={"messages": [told]})]

    @tool
    async def careless(text: str) -> Any:
        """Forgets its result."""
        return Command(update={"messages": [HumanMessage(text)]})

    graphs.tools.add("note", note)
    graphs.tools.add("careless", careless)
    rules: dict[str, Any] = {"review": {"tools": {"note": {}, "careless": {}}}} if reviewed else {}
    calls = script(("note", {"text": "x"}), ("careless", {"text": "x"}))
    agent = agents.agent(graphs=graphs, model=calls, tools=["note", "careless"], **rules)
    messages = await agent.say()
    if reviewed:
        messages = await agent.decide({0: edit("note", text="y"), 1: ACCEPT})
        assert results(messages)[0].text.startswith("y")
        assert "a reviewer changed text" in results(messages)[0].text
        assert [p["receipt"]["status"] for p in await agent.permits()] == ["success", "error"]
    assert [r.status for r in results(messages)] == ["success", "error"]
    paired(messages)


async def test_an_endless_loop_ends_in_the_limit(agents: Agents) -> None:
    again = {"after_tool": "peek", "tool_calls": [{"name": "peek", "args": {"amount": 1}}]}
    agent = agents.agent(model=script(("peek", {"amount": 1}), rules=[again]), tools=["peek"])
    with pytest.raises(GraphRecursionError):
        await agent.say()
    assert len(agents.effects) == 12


async def test_a_tool_may_end_the_turn(agents: Agents) -> None:
    graphs = agents.graphs()

    @tool(return_direct=True)
    async def final() -> str:
        """Its result is the answer."""
        return "that was it"

    graphs.tools.add("final", final)
    for rules in ({}, {"review": {"tools": {"final": {}}}}):
        agent = agents.agent(graphs=graphs, model=script(("final", {})), tools=["final"], **rules)
        messages = await agent.say()
        if rules:
            messages = await agent.decide({0: ACCEPT})
        assert messages[-1].text == "that was it"


async def test_steps_stream_and_private_state_is_not_an_output(agents: Agents) -> None:
    agent = agents.agent(model=script(("pay", {"amount": 1})), tools=["pay"], review={"tools": {"pay": {}}})
    given = {"messages": [{"type": "human", "content": "go"}]}
    assert (await agent.run(given)).keys() == {"messages", "__interrupt__"}
    (question,) = await agent.questions()
    await agent.permit(question.value[0])
    chunks: list[AIMessageChunk] = []
    async for message, metadata in agent.graph.astream(  # type: ignore[misc]
        Command(resume={question.id: ACCEPT}),
        agent.config(),  # type: ignore[arg-type]
        stream_mode="messages",
    ):
        if isinstance(message, AIMessageChunk):
            chunks.append(message)
            assert metadata["ls_provider"] == "scripted"  # type: ignore[index]
    assert [c.text for c in chunks] == ["All", " done.", ""]


# -- prompts ----------------------------------------------------------------------------------------------------------

ECHO = {"provider": "scripted", "params": {"else": "{system}"}}


async def test_a_template_sees_its_variables(agents: Agents) -> None:
    text = (
        "{{ context.tone | default('plain') }} {{ user_id }} {{ user }} {{ now.year > 2000 }} {{ memories | length }} "
        "{{ state.messages[-1].role }}:{{ state.messages[-1].content }} {{ thread_id }}"
    )
    agent = agents.agent(model=ECHO, prompt={"type": "template", "text": text})
    messages = await agent.say("hi", context={"tone": "kind"})
    assert messages[-1].text == f"kind alice alice True 0 user:hi {agent.thread_id}"


async def test_the_server_says_who_the_user_is(agents: Agents) -> None:
    agent = agents.agent(model=ECHO, prompt={"type": "template", "text": "{{ context.user_id }}"})
    assert (await agent.say("hi", context={"user_id": "mallory"}))[-1].text == "alice"


async def test_a_text_is_not_a_template(agents: Agents) -> None:
    assert (await agents.agent(model=ECHO, prompt="{{ user }} {x}").say("hi"))[-1].text == "{{ user }} {x}"


async def test_a_template_that_lacks_a_value_is_an_error_of_the_run(agents: Agents) -> None:
    agent = agents.agent(model=ECHO, prompt={"type": "template", "text": "{{ context.tone }}"})
    with pytest.raises(PromptError, match="'tone'"):
        await agent.say("hi")


# -- messages ---------------------------------------------------------------------------------------------------------


def call(id_: str | None, **args: Any) -> dict[str, Any]:
    return {"name": "t", "args": args, "id": id_, "type": "tool_call"}


def test_calls_get_ids_of_their_own() -> None:
    bad = {"name": "t", "args": "{", "id": "a", "error": None, "type": "invalid_tool_call"}
    reply = AIMessage("", tool_calls=[call("a"), call("a"), call(None), call("")], invalid_tool_calls=[bad])
    message = settled(reply, [], None)
    ids = [c["id"] for c in (*message.tool_calls, *message.invalid_tool_calls)]
    assert ids[0] == "a"
    assert len(set(ids)) == 5
    assert all(ids)
    assert message.id


def test_a_message_id_that_the_thread_has_is_replaced() -> None:
    reply = AIMessage("x", id="1")
    assert settled(reply, [], None) is reply
    assert settled(reply, [HumanMessage("y", id="1")], None).id != "1"


def test_arguments_lose_what_postgres_cannot_hold() -> None:
    message = settled(AIMessage("", tool_calls=[call("a", x="a\0b\ud800", y=[float("nan"), 10**30, 10**400, 5])]), [], None)
    args = message.tool_calls[0]["args"]
    assert args["y"] == [None, 1e30, None, 5]
    assert "\0" not in args["x"]
    assert storable({"a": {"b": float("inf")}}) == {"a": {"b": None}}


def test_the_history_is_made_whole_for_the_provider() -> None:
    ask = AIMessage("", tool_calls=[call("a"), call("b")])
    given = [
        SystemMessage("s"),
        ToolMessage("stray", tool_call_id="z"),
        HumanMessage("1"),
        ask,
        ToolMessage("B", tool_call_id="b"),
        ToolMessage("stray", tool_call_id="y"),
        HumanMessage("2"),
    ]
    view = for_provider(given)  # type: ignore[arg-type]
    assert [m.type for m in view] == ["system", "human", "ai", "tool", "tool", "human"]
    assert [m.tool_call_id for m in view if isinstance(m, ToolMessage)] == ["a", "b"]
    assert view[3].status == "error"  # type: ignore[union-attr]
    assert view[4].text == "B"
    whole = [HumanMessage("1"), ask, ToolMessage("A", tool_call_id="a"), ToolMessage("B", tool_call_id="b"), AIMessage("end")]
    assert for_provider(whole) == whole  # type: ignore[arg-type]
