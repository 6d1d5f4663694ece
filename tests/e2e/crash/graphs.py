"""A graph and a tool that stop at named points until the test lets them go, and whose effects are rows."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

import psycopg
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    messages: Annotated[list[Any], add_messages]


async def effect(name: str, *, waits: bool = False) -> None:
    """Leave a row, and wait until there is one that lets this go on."""
    async with await psycopg.AsyncConnection.connect(os.environ["CRASH_URL"], autocommit=True) as connection:
        await connection.execute("INSERT INTO crash_effects (name) VALUES (%s)", [name])
        while waits and await (await connection.execute("SELECT 1 FROM crash_go WHERE name = %s", [name])).fetchone() is None:
            await asyncio.sleep(0.02)


async def first(state: State) -> dict[str, Any]:
    """Asks when told to."""
    said = state["messages"][-1].content
    await effect(f"first {said}")
    if said == "ask":
        return {"messages": [AIMessage(f"answered {interrupt({'question': 'May I?'})}")]}
    return {"messages": [AIMessage(f"first {said}")]}


async def second(state: State) -> dict[str, Any]:
    """Waits to be let go."""
    await effect("second", waits=True)
    return {"messages": [AIMessage("second")]}


steps = (
    StateGraph(State)
    .add_node("first", first)
    .add_node("second", second)
    .add_edge(START, "first")
    .add_edge("first", "second")
    .add_edge("second", END)
    .compile()
)


@tool
async def work(name: str) -> str:
    """Waits to be let go."""
    await effect(f"work {name}", waits=True)
    return f"worked {name}"
