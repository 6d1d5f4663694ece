"""What a thread's state asks, and which of its messages settles a call. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.inbox.models import InboxItem
from app.inbox.payloads import Question, breakpoint_value, read, read_breakpoint, value_hash
from app.runs.ports import PendingInterrupt

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that waits in the state of a thread."""

    interrupt_id: str
    value: Any
    hash: str
    question: Question
    task_id: str | None = None
    path: tuple[str, ...] = ()
    schema: Any = None

    @property
    def key(self) -> Key:
        """Identity on its thread: the same interrupt with another value is another question."""
        return self.interrupt_id, self.hash

    @property
    def call(self) -> tuple[str | None, int | None]:
        """The call that is asked about."""
        return self.question.message_id, self.question.call_index


def asked(pending: list[PendingInterrupt]) -> dict[Key, Asked]:
    """The questions among a state's interrupts, by identity."""
    found = {}
    for p in pending:
        path = (*(part.split(":", 1)[0] for part in p.namespace), p.node)
        one = Asked(p.interrupt_id, p.value, value_hash(p.value), read(p.value), p.task_id, path, p.response_schema)
        found[one.key] = one
    return found


def stopped_at(nodes: list[str], checkpoint_id: str | None) -> dict[Key, Asked]:
    """The question of a static breakpoint: may the graph go on?"""
    if not nodes:
        return {}
    value = breakpoint_value(checkpoint_id, nodes)
    id_, question = read_breakpoint(value)
    one = Asked(id_, value, value_hash(value), question, path=tuple(sorted(nodes)))
    return {one.key: one}


def tool_message_id(values: Any, item: InboxItem) -> str | None:
    """Id of the tool message that answers the item's call.

    Providers use call ids twice, so only messages between the call's AI message and the next one count, and the second
    call with an id belongs to the second message with it.
    """
    messages = values.get("messages") if isinstance(values, Mapping) else None
    if item.tool_call_id is None or not isinstance(messages, list):
        return None
    start, before = 0, 0
    if item.message_id is not None:
        at = next((i for i, m in enumerate(messages) if _get(m, "id") == item.message_id), None)
        if at is None:
            return None
        calls = _get(messages[at], "tool_calls") or []
        before = sum(call.get("id") == item.tool_call_id for call in calls[: item.call_index or 0])
        start = at + 1
    for message in messages[start:]:
        kind = _get(message, "type")
        if kind == "ai" and item.message_id is not None:
            return None
        if kind == "tool" and _get(message, "tool_call_id") == item.tool_call_id:
            if before == 0:
                return str(_get(message, "id")) if _get(message, "id") else None
            before -= 1
    return None


def _get(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)
