"""Graphs that ask in every way but that of our own gate."""

from __future__ import annotations

import itertools
import operator
from typing import Annotated, Any

from langgraph.func import entrypoint
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    value: Any
    log: Annotated[list[Any], operator.add]


def asking(state: State) -> dict[str, Any]:
    """Asks with the value of the input, whatever it is."""
    return {"log": [{"answer": interrupt(state.get("value"))}]}


def asking_twice(state: State) -> dict[str, Any]:
    """Two questions in one node."""
    first = interrupt("first?")
    return {"log": [first, interrupt("second?")]}


def small(state: State) -> dict[str, Any]:
    """The first of two questions of two nodes."""
    return {"log": [f"small={interrupt('transfer 10?')}"]}


def large(state: State) -> dict[str, Any]:
    """The second one."""
    return {"log": [f"large={interrupt('transfer 9999?')}"]}


def left(state: State) -> None:
    """Asks, and writes nothing."""
    interrupt("left?")


def right(state: State) -> dict[str, Any]:
    """Asks at the same time."""
    return {"log": [interrupt("right?")]}


TIMES = itertools.count()


def moving(state: State) -> dict[str, Any]:
    """Asks something else each time it is run."""
    return {"log": [interrupt({"time": next(TIMES)})]}


def strict(state: State) -> dict[str, Any]:
    """An answer that it does not like breaks it."""
    answer = interrupt("a number?")
    if not isinstance(answer, int):
        raise ValueError(f"not a number: {answer}")
    return {"log": [answer]}


def fragile(state: State) -> None:
    """Breaks after an answer was taken."""
    if state["log"][-1] == 13:
        raise ValueError("thirteen")


def after(state: State) -> dict[str, Any]:
    """What comes next."""
    return {"log": ["after"]}


ask = StateGraph(State).add_sequence([asking, after]).add_edge(START, "asking").compile()
twice = StateGraph(State).add_node(asking_twice).add_edge(START, "asking_twice").compile()
row = StateGraph(State).add_sequence([small, large]).add_edge(START, "small").compile()
parallel = (
    StateGraph(State)
    .add_node(left)
    .add_node(right)
    .add_edge(START, "left")
    .add_edge(START, "right")
    .add_edge("left", END)
    .add_edge("right", END)
    .compile()
)
drifting = StateGraph(State).add_node(right).add_node(moving).add_edge(START, "right").add_edge(START, "moving").compile()
picky = StateGraph(State).add_sequence([strict, fragile]).add_edge(START, "strict").compile()
nested = StateGraph(State).add_node("inner", ask).add_edge(START, "inner").compile()


@entrypoint()
def functional(value: dict[str, Any]) -> dict[str, Any]:
    """The review of a call as the guides for the functional API have it."""
    call = {"name": "charge", "args": value.get("args", {"amount": 5}), "id": "call_1", "type": "tool_call"}
    return {"review": interrupt({"question": "Is this correct?", "tool_call": call})}
