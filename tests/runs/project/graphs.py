"""Graphs that ask twice in one node, alone and as a subgraph, and then go on until they are cancelled."""

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


def ask(state: State) -> dict[str, Any]:
    """Two questions, one after the other."""
    first = interrupt({"question": "first?"})
    second = interrupt({"question": f"second, after {first}?"})
    return {"messages": [AIMessage(f"{first} {second}")]}


async def hold(state: State) -> dict[str, Any]:
    """Goes on until it is cancelled."""
    await asyncio.Event().wait()
    return {}


asks = (
    StateGraph(State)
    .add_node("ask", ask)
    .add_node("hold", hold)
    .add_edge(START, "ask")
    .add_edge("ask", "hold")
    .add_edge("hold", END)
    .compile()
)
outer = StateGraph(State).add_node("inner", asks).add_edge(START, "inner").add_edge("inner", END).compile()
