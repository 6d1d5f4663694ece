"""Graphs that stream: one in small steps, one until a file is there, one that asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict

STEPS = 4


class State(TypedDict, total=False):
    count: int
    until: str
    answer: str


async def step(state: State) -> dict[str, Any]:
    """Two events a step, and time for a flush between them."""
    write = get_stream_writer()
    for i in range(2):
        write({"step": state.get("count", 0), "event": i})
        await asyncio.sleep(0.03)
    return {"count": state.get("count", 0) + 1}


async def tick(state: State) -> dict[str, Any]:
    """An event every hundredth of a second, until the file is there."""
    write, count = get_stream_writer(), 0
    while not await asyncio.to_thread(Path(state["until"]).exists):
        write({"tick": (count := count + 1)})
        await asyncio.sleep(0.01)
    return {"count": count}


def ask(state: State) -> dict[str, Any]:
    """A question."""
    return {"answer": interrupt("well?")}


def more(state: State) -> str:
    """Until there were enough steps."""
    return "step" if state["count"] < STEPS else END


steps = StateGraph(State).add_node("step", step).add_edge(START, "step").add_conditional_edges("step", more).compile()
ticks = StateGraph(State).add_node("tick", tick).add_edge(START, "tick").add_edge("tick", END).compile()
asks = StateGraph(State).add_node("ask", ask).add_edge(START, "ask").add_edge("ask", END).compile()
