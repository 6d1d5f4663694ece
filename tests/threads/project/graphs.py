"""Graphs of an operator, as the tests of threads need them: one that asks, and one that asks from a subgraph."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    messages: Annotated[list[Any], add_messages]
    mode: str
    answer: Any


def agent(state: State) -> dict[str, Any]:
    """Says hello, once for each turn."""
    return {"messages": [AIMessage(f"Hello {len(state['messages'])}", id=f"ai-{len(state['messages'])}")]}


def question(state: State) -> dict[str, Any]:
    """Asks when told to."""
    if state.get("mode") != "ask":
        return {}
    return {"answer": interrupt({"question": "approve?", "options": ["yes", "no"]})}


ask = (
    StateGraph(State)
    .add_node("agent", agent)
    .add_node("ask", question)
    .add_edge(START, "agent")
    .add_edge("agent", "ask")
    .add_edge("ask", END)
    .compile()
)

parent = StateGraph(State).add_node("child", ask).add_edge(START, "child").add_edge("child", END).compile()


async def wait(state: State) -> dict[str, Any]:
    """Goes on until it is cancelled."""
    await asyncio.Event().wait()
    return {}


slow = StateGraph(State).add_node("wait", wait).add_edge(START, "wait").add_edge("wait", END).compile()
