"""Code that an operator should not have written: each hazard as a tool, and as a node of the graph `hostile`."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Annotated, Any, TypedDict

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

FOREVER = 3600.0


def block_thread() -> str:
    """Sleeps in its thread, and comes back."""
    time.sleep(1)
    return "slept"


def hang_thread() -> str:
    """Never returns."""
    threading.Event().wait()
    return ""


async def hang() -> str:
    """Never returns, and lets others run."""
    await asyncio.Event().wait()
    return ""


async def sleep_in_loop() -> str:
    """Blocks everybody."""
    time.sleep(FOREVER)  # noqa: ASYNC251
    return ""


async def wait_in_loop() -> str:
    """Waits for a thread, and blocks everybody."""
    threading.Event().wait()
    return ""


async def spin_in_loop() -> str:
    """Computes for ever."""
    n = 0
    while True:
        n = _step(n)


def _step(n: int) -> int:
    return n + 1


async def block_in_task() -> str:
    """Blocks everybody in a task of its own."""
    await asyncio.gather(asyncio.sleep(0), sleep_in_loop())
    return ""


async def exit_process() -> str:
    """Wants the process to end."""
    raise SystemExit(3)


def exit_from_thread() -> str:
    """Wants the process to end."""
    raise SystemExit(3)


async def exit_from_task() -> str:
    """Wants the process to end, in a task of its own."""
    await asyncio.gather(exit_process())
    return ""


async def press_ctrl_c() -> str:
    """Looks like a Ctrl-C."""
    raise KeyboardInterrupt


async def end_generator() -> str:
    """Looks like the end of a generator."""
    raise GeneratorExit


LOOP = (sleep_in_loop, wait_in_loop, spin_in_loop, block_in_task)
EXIT = (exit_process, exit_from_thread, exit_from_task, press_ctrl_c, end_generator)
HAZARDS: dict[str, Any] = {f.__name__: f for f in (block_thread, hang_thread, hang, *LOOP, *EXIT)}


class State(TypedDict, total=False):
    """What the graph is told to do, and what came of it."""

    mode: str
    size: int
    result: Any
    messages: Annotated[list[AnyMessage], add_messages]


def _flood(size: int) -> str:
    writer = get_stream_writer()
    for i in range(size):
        writer({"n": i})
    return "flooded"


async def flood(state: State) -> State:
    """Emits events without a pause, from the loop."""
    for _ in range(20):
        _flood(state["size"] // 20)
        await asyncio.sleep(0)
    return {"result": "flooded"}


def flood_from_thread(state: State) -> State:
    """Emits events without a pause, from a thread."""
    return {"result": _flood(state["size"])}


async def grow(state: State) -> State:
    """Makes a large state."""
    return {"result": "x" * state["size"]}


async def talk(state: State) -> State:
    """A model that speaks for a long time."""
    model = GenericFakeChatModel(messages=iter([AIMessage("word " * state["size"])]))
    return {"messages": [await model.ainvoke([HumanMessage("hi")])]}


def _node(hazard: Any) -> Any:
    if asyncio.iscoroutinefunction(hazard):

        async def call(state: State) -> State:
            return {"result": await hazard()}

        return call
    return lambda state: {"result": hazard()}


builder = StateGraph(State)
NODES = {**{name: _node(f) for name, f in HAZARDS.items()}}
NODES |= {"flood": flood, "flood_from_thread": flood_from_thread, "grow": grow, "talk": talk}
for name, node in NODES.items():
    builder.add_node(name, node)
builder.add_conditional_edges(START, lambda state: state["mode"], list(NODES))
hostile = builder.compile()
