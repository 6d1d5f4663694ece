"""Names, shapes and order of events, made from what real graphs stream."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

import orjson
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt

from app.streaming.chunks import ChunkEncoder


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    log: Annotated[list[str], operator.add]
    secret: str


async def agent(state: State) -> dict[str, Any]:
    get_stream_writer()({"progress": 1})
    model = GenericFakeChatModel(messages=iter([AIMessage("Hello there")]))
    return {"messages": [await model.ainvoke(state["messages"])], "secret": "s"}


def ask(question: dict[str, str]) -> dict[str, Any]:
    return {"log": [interrupt(question)]}


def free(_: Any) -> dict[str, Any]:
    return {"log": ["free"]}


def talking() -> Any:
    builder = StateGraph(State).add_node("agent", agent)
    return builder.add_edge(START, "agent").add_edge("agent", END).compile(checkpointer=InMemorySaver())


def asking() -> Any:
    builder = StateGraph(State).add_node("ask", ask).add_node("free", free).add_node("done", lambda _: {"log": ["done"]})
    sends = [Send("ask", {"q": "1"}), Send("ask", {"q": "2"}), Send("free", {})]
    builder.add_conditional_edges(START, lambda _: sends, ["ask", "free"])
    return builder.add_edge("ask", "done").add_edge("done", END).compile(checkpointer=InMemorySaver())


async def events(
    graph: Any, feed: Any, modes: list[str], *, subgraphs: bool = False, **kwargs: Any
) -> tuple[list[tuple[str, Any]], ChunkEncoder]:
    """All events of one invocation, as `(name, data)`, the held ones last."""
    encoder = ChunkEncoder(modes, subgraphs=subgraphs, private=frozenset({"secret"}))
    seen: list[tuple[str, bytes]] = []
    config = {"configurable": {"thread_id": "t", "run_id": "r", "__inner": 1}}
    async for namespace, mode, payload in graph.astream(
        feed, config, stream_mode=encoder.langgraph_modes, subgraphs=True, **kwargs
    ):
        if subgraphs or not namespace:
            seen += encoder.encode(namespace, mode, payload)
    return [(name, orjson.loads(data)) for name, data in [*seen, *encoder.held]], encoder


HI = {"messages": [{"role": "user", "content": "hi", "id": "m1"}]}


async def test_order_and_shapes_of_the_usual_modes() -> None:
    seen, encoder = await events(talking(), HI, ["values", "updates", "messages-tuple", "custom"])
    assert [name for name, _ in seen] == ["values", "custom", *["messages"] * 3, "updates", "values"]
    chunk, metadata = seen[2][1]
    assert chunk["type"] == "AIMessageChunk"
    assert chunk["content"] == "Hello"
    assert [seen[i][1][0]["chunk_position"] for i in (2, 3, 4)] == [None, None, "last"]
    assert metadata["langgraph_node"] == "agent"
    assert metadata["langgraph_step"] == 1
    assert metadata["thread_id"] == "t"
    assert not [key for key in metadata if key.startswith("__")]
    whole = seen[5][1]["agent"]["messages"][0]
    assert (whole["type"], whole["content"], whole["id"]) == ("ai", "Hello there", chunk["id"])
    assert [m["id"] for m in seen[6][1]["messages"]] == ["m1", chunk["id"]]
    assert encoder.last_values is not None
    assert not encoder.paused


async def test_private_state_reaches_nobody() -> None:
    seen, _ = await events(talking(), HI, ["values", "updates", "tasks", "checkpoints", "debug"])
    assert b'"secret":"s"' not in orjson.dumps(seen)
    assert b"__inner" not in orjson.dumps(seen)


async def test_the_older_message_mode_is_cumulative() -> None:
    seen, _ = await events(talking(), HI, ["messages"])
    assert [name for name, _ in seen] == ["messages/metadata", *["messages/partial"] * 3]
    assert [data[0]["content"] for _, data in seen[1:]] == ["Hello", "Hello ", "Hello there"]
    assert [data[0]["type"] for _, data in seen[1:]] == ["ai"] * 3


async def test_each_question_is_held_and_told_last_with_the_newest_values() -> None:
    graph = asking()
    seen, encoder = await events(graph, {"log": ["in"]}, ["values", "updates"])
    assert [name for name, _ in seen] == ["values", "updates", "values", "updates", "values", "updates", "values"]
    assert seen[1] == ("updates", {"free": {"log": ["free"]}})
    for i, question in ((3, "1"), (5, "2")):
        [told] = seen[i][1]["__interrupt__"]
        assert told == {"value": {"q": question}, "id": told["id"], "response_schema": None}
        assert seen[i + 1][1] == {"messages": [], "log": ["in", "free"], "__interrupt__": [told]}
    assert encoder.paused
    assert len({i.id for i in encoder.interrupts}) == 2


async def test_a_resume_does_not_repeat_what_clients_have_seen() -> None:
    graph = asking()
    _, encoder = await events(graph, {"log": ["in"]}, ["updates"])
    seen, _ = await events(graph, Command(resume={i.id: "yes" for i in encoder.interrupts}), ["updates"])
    assert seen == [
        ("updates", {"ask": {"log": ["yes"]}}),
        ("updates", {"ask": {"log": ["yes"]}}),
        ("updates", {"done": {"log": ["done"]}}),
    ]


async def test_a_static_breakpoint_is_an_empty_question() -> None:
    seen, encoder = await events(talking(), HI, ["values", "updates"], interrupt_before=["agent"])
    assert seen[-1] == ("updates", {"__interrupt__": []})
    assert encoder.paused
    assert encoder.interrupts == []


async def test_without_values_or_updates_no_question_is_sent_but_it_is_known() -> None:
    seen, encoder = await events(asking(), {"log": ["in"]}, ["custom"])
    assert seen == []
    assert len(encoder.interrupts) == 2


@pytest.mark.parametrize("mode", ["values", "updates", "messages-tuple", "custom"])
async def test_subgraphs_carry_their_namespace(mode: str) -> None:
    outer = StateGraph(State).add_node("child", talking())
    graph = outer.add_edge(START, "child").compile(checkpointer=InMemorySaver())
    seen, _ = await events(graph, HI, [mode], subgraphs=True)
    name = "messages" if mode == "messages-tuple" else mode
    inner = [n for n, _ in seen if "|" in n]
    assert inner
    assert all(n.startswith(f"{name}|child:") for n in inner)
