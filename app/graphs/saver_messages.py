"""Long threads: each superstep saves only the messages it added.

LangGraph saves the value of a channel whole, so a list of messages is written anew at every step. Its `DeltaChannel` saves
none and replays the writes of earlier steps instead. Threads saved before go on: their list is where the replay begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Self
from uuid import UUID, uuid4, uuid5

from langchain_core.messages import BaseMessage, BaseMessageChunk, RemoveMessage, convert_to_messages
from langgraph.channels import BinaryOperatorAggregate
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import PendingWrite
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

from app.graphs.saver import Saver
from app.graphs.saver_history import Writes

Graph = CompiledStateGraph[Any, Any, Any, Any]

FEWEST_UPDATES = 1000
"""Updates between two whole copies of a list. A long one doubles before the next, so all copies together are linear in it."""
ID = attrgetter("id")
SPECIAL = (RemoveMessage, BaseMessageChunk)
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
    """A list of messages under `add_messages`. Knows the ids in its list, so that to append does not mean to look at all."""

    __slots__ = ("ids",)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(merged, list)
        self.ids: frozenset[Any] | None = None

    @property
    def snapshot_frequency(self) -> int:
        """After how many updates LangGraph saves the list whole."""
        return max(FEWEST_UPDATES, len(self.value) // 2 if isinstance(self.value, list) else 0)

    @snapshot_frequency.setter
    def snapshot_frequency(self, _: int) -> None:
        """Set by the base class, which knows only a fixed number."""

    def copy(self) -> Self:
        """A channel with a list of its own."""
        new = super().copy()
        new.ids = self.ids
        return new

    def update(self, values: Sequence[Any]) -> bool:
        """Merge what a superstep wrote."""
        if values and self._append(values):
            return True
        self.ids = None
        return super().update(values)

    def replay_writes(self, writes: Sequence[PendingWrite]) -> None:
        """Apply the writes since the list was saved whole, but for those whose result is known."""
        if not isinstance(writes, Writes):
            return super().replay_writes(writes)
        count, value, ids = writes.chain.made
        start = count if count <= len(writes) else 0
        if start:
            self.value, self.ids = list(value), ids
        rest = writes[start:]
        if not self._append([write for _, _, write in rest]):
            self.ids = None
            super().replay_writes(rest)
        if len(writes) > count:
            writes.chain.made = len(writes), list(self.value), self.ids
        return None

    def _append(self, values: Sequence[Any]) -> bool:
        """Append, if that is all that there is to do."""
        added = [item for value in values for item in (value if isinstance(value, list) else (value,))]
        for item in added:
            if isinstance(item, BaseMessage) and item.id is None:  # only ever before it is saved
                item.id = str(uuid4())
        if not isinstance(self.value, list) or not all(map(_plain, added)):
            return False
        if self.ids is None or len(self.ids) != len(self.value):
            self.ids = frozenset(map(ID, self.value)) if all(map(_plain, self.value)) else None
            if self.ids is None or len(self.ids) != len(self.value):
                return False
        ids = self.ids.union(map(ID, added))
        if len(ids) != len(self.value) + len(added):
            return False
        self.value, self.ids = [*self.value, *added], ids
        return True


def _plain(item: Any) -> bool:
    """Whether `add_messages` would take it as it is, if its id is new."""
    return isinstance(item, BaseMessage) and bool(item.id) and not isinstance(item, SPECIAL)


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
        if all(map(_plain, items)):
            added += items
            continue
        messages, added = add_messages(messages, added) if added else messages, []
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
