"""A graph whose second step comes to its end only in a process that is told so."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    messages: Annotated[list[Any], add_messages]


def first(state: State) -> dict[str, Any]:
    """A step that is saved before the process dies; asks when told to."""
    said = state["messages"][-1].content
    if said == "ask":
        return {"messages": [AIMessage(f"answered: {interrupt({'question': 'May I?'})}")]}
    return {"messages": [AIMessage(f"first: {said}")]}


async def second(state: State) -> dict[str, Any]:
    """Waits for ever, unless UPGRADE_GO is set."""
    if "UPGRADE_GO" not in os.environ and state["messages"][-1].content != "answered: yes":
        await asyncio.Event().wait()
    return {"messages": [AIMessage("second")]}


waits = (
    StateGraph(State)
    .add_node("first", first)
    .add_node("second", second)
    .add_edge(START, "first")
    .add_edge("first", "second")
    .add_edge("second", END)
    .compile()
)
