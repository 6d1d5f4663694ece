"""Long threads: each superstep saves only the messages it added.

LangGraph saves the value of a channel whole, so a list of messages is written anew at every step. Its `DeltaChannel` saves
none and replays the writes of earlier steps instead. Threads saved before go on: their list is where the replay begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid5

from langchain_core.messages import BaseMessage, RemoveMessage, convert_to_messages
from langgraph.channels import BinaryOperatorAggregate
from langgraph.channels.delta import DeltaChannel
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

from app.graphs.saver import Saver

Graph = CompiledStateGraph[Any, Any, Any, Any]

FEWEST_UPDATES = 1000
"""Updates between two whole copies of a list. A long one doubles before the next, so all copies together are linear in it."""
IDS = UUID("d6ccff6f-3c4c-4be0-8bd5-1e5b1d1f2b0e")
"""Namespace of the ids of messages that were written as plain text."""


def append_only(graph: Graph) -> Graph:
    """A copy of the graph whose `add_messages` channels save only what is added. The same graph if it has none."""
    found = {
        name: _named(MessagesChannel(), name)
        for name, channel in graph.channels.items()
        if isinstance(channel, BinaryOperatorAggregate) and channel.operator is add_messages
    }
    if not found:
        return graph
    saver = graph.checkpointer
    return graph.copy(
        {
            "channels": {**graph.channels, **found},
            "checkpointer": saver.trailing() if isinstance(saver, Saver) else saver,
        }
    )


class MessagesChannel(DeltaChannel[Any]):
    """A list of messages under `add_messages`."""

    __slots__ = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(merged, list)

    @property
    def snapshot_frequency(self) -> int:
        """After how many updates LangGraph saves the list whole."""
        return max(FEWEST_UPDATES, len(self.value) // 2 if isinstance(self.value, list) else 0)

    @snapshot_frequency.setter
    def snapshot_frequency(self, _: int) -> None:
        """Set by the base class, which knows only a fixed number."""


def _named(channel: MessagesChannel, name: str) -> MessagesChannel:
    channel.key = name
    return channel


def merged(messages: Any, writes: Sequence[Any]) -> Any:
    """`add_messages` for one write after the other, at the cost of one where they only add.

    Deterministic, as replay needs it: a message that was written as text gets the same id each time.
    """
    added: list[Any] = []
    for write in writes:
        items = write if isinstance(write, list) else [write]
        if all(isinstance(item, BaseMessage) and not isinstance(item, RemoveMessage) for item in items):
            added += items
            continue
        if added:
            messages, added = add_messages(messages, added), []
        messages = add_messages(messages, _identified(messages, items))
    return add_messages(messages, added) if added else messages


def _identified(messages: Any, items: list[Any]) -> list[Any]:
    last = messages[-1] if isinstance(messages, list) and messages else None
    place = f"{len(messages) if isinstance(messages, list) else 0} {getattr(last, 'id', '')}"
    found: list[Any] = []
    for i, item in enumerate(items):
        if not isinstance(item, BaseMessage):
            (item,) = convert_to_messages([item])
        if not item.id:
            item.id = str(uuid5(IDS, f"{place} {i} {item.type} {item.content}"))
        found.append(item)
    return found
