"""Which messages a client may put into a state. Every route that takes an input or a state update goes through here.

A client speaks as the user. What would rewrite a conversation (other roles, removals, serialised objects, the id of a
message that is already there) is refused, or needs the scope `threads:repair`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.auth import Principal
from app.codec import clean
from app.errors import FieldError, Invalid

USER = {"user": "human", "human": "human"}
REPAIR = {"assistant": "ai", "ai": "ai", "tool": "tool"}
REFUSED = frozenset({"system", "developer", "function", "chat", "remove", "constructor"})
ROLES = frozenset({*USER, *REPAIR, *REFUSED})

COMMON = ("content", "id", "name", "additional_kwargs")
KEPT = {
    "human": COMMON,
    "ai": (*COMMON, "tool_calls", "invalid_tool_calls", "usage_metadata", "response_metadata"),
    "tool": (*COMMON, "tool_call_id", "status", "artifact"),
}
MESSAGES = "messages"


def accept_input(value: Any, principal: Principal, *, path: str = "input") -> Any:
    """The input of a run, or the values of a state update, cleaned and with plain messages only; Invalid names what is wrong.

    Takes all forms that LangGraph does: a state object, a message or list of messages, a list of `[key, value]` pairs.
    """
    value = clean(value)
    errors: list[FieldError] = []
    accepted = _Acceptor(principal.can("threads:repair"), errors).state(value, path)
    if errors:
        raise Invalid("; ".join(f"{e['path']}: {e['message']}" for e in errors[:3]), errors=errors, code="invalid_message")
    return accepted


def named_messages(value: Any) -> dict[str, dict[str, Any]]:
    """The messages of an accepted input that bring an id, by it."""
    return {m["id"]: m for m in _messages(value) if isinstance(m, dict) and m.get("id")}


def _messages(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if _is_message(value):
            yield value
        else:
            found = value.get(MESSAGES)
            yield from found if isinstance(found, list) else [found]
    elif isinstance(value, list):
        for item in value:
            if _is_pair(item):
                yield from item[1] if isinstance(item[1], list) else [item[1]]
            elif isinstance(item, dict) and _is_message(item):
                yield item


def _is_message(value: dict[str, Any]) -> bool:
    """Whether an object is a message rather than a state."""
    role = value.get("role", value.get("type"))
    return isinstance(role, str) and (role in ROLES or role.endswith("MessageChunk")) and MESSAGES not in value


def _is_private(key: str) -> bool:
    """Whether a channel belongs to LangGraph or to us. What a client puts there is dropped without a word."""
    return key.startswith("__")


def _is_private_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and _is_private(item[0])


def _is_pair(item: Any) -> bool:
    """Whether an element of a list is a `["messages", value]` pair of an update."""
    return isinstance(item, list) and len(item) == 2 and item[0] == MESSAGES


class _Acceptor:
    """One walk through one input; collects every error instead of stopping at the first."""

    def __init__(self, repair: bool, errors: list[FieldError]) -> None:
        self.repair = repair
        self.errors = errors

    def state(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            if _is_message(value):
                return self.message(value, path)
            return {key: self.channel(key, item, f"{path}.{key}") for key, item in value.items() if not _is_private(key)}
        if isinstance(value, list):
            return [self._element(item, f"{path}.{i}") for i, item in enumerate(value) if not _is_private_pair(item)]
        return value

    def channel(self, key: str, value: Any, path: str) -> Any:
        if key != MESSAGES:
            return self.plain(value, path)
        if isinstance(value, list) and not (len(value) == 2 and isinstance(value[0], str) and value[0] in ROLES):
            return [self.message(item, f"{path}.{i}") for i, item in enumerate(value)]
        return None if value is None else self.message(value, path)

    def _element(self, item: Any, path: str) -> Any:
        if _is_pair(item):
            return [MESSAGES, self.channel(MESSAGES, item[1], f"{path}.{MESSAGES}")]
        return self.message(item, path) if isinstance(item, dict) and _is_message(item) else self.plain(item, path)

    def plain(self, value: Any, path: str) -> Any:
        """Other state: any JSON, but no serialised object, at any depth that LangGraph would look at."""
        for i, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, dict) and "lc" in item and item.get("type") == "constructor":
                self._refuse(f"{path}.{i}" if isinstance(value, list) else path, "serialised objects are not taken")
        return value

    def message(self, value: Any, path: str) -> Any:
        if isinstance(value, str):
            return {"type": "human", "content": value}
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
            value = {"role": value[0], "content": value[1]}
        if not isinstance(value, dict):
            return self._refuse(path, "not a message; use {role, content}")
        if "lc" in value:
            return self._refuse(path, "serialised objects are not taken; use {role, content}")
        role = value.get("role", value.get("type"))
        kind = self._kind(role, path)
        if kind is None:
            return value
        content = value.get("content")
        if kind != "human" and content is None:
            content = ""
        if not isinstance(content, str) and not (
            isinstance(content, list) and all(isinstance(block, str | dict) for block in content)
        ):
            return self._refuse(f"{path}.content", "must be text or a list of content blocks")
        for field in ("id", "name", "tool_call_id"):
            if value.get(field) is not None and not isinstance(value[field], str):
                return self._refuse(f"{path}.{field}", "must be text")
        if kind == "tool" and not value.get("tool_call_id"):
            return self._refuse(f"{path}.tool_call_id", "a tool message names the call that it answers")
        if not isinstance(value.get("additional_kwargs") or {}, dict):
            return self._refuse(f"{path}.additional_kwargs", "must be an object")
        kept = {key: value[key] for key in KEPT[kind] if value.get(key) not in (None, [], {})}
        return {**kept, "type": kind, "content": content}

    def _kind(self, role: Any, path: str) -> str | None:
        if isinstance(role, str) and role in USER:
            return USER[role]
        if isinstance(role, str) and role in REPAIR:
            if self.repair:
                return REPAIR[role]
            self._refuse(f"{path}.role", f"{role} messages need the scope threads:repair; a client speaks as the user")
        else:
            self._refuse(f"{path}.role", f"{role!r} is not taken from clients; use user")
        return None

    def _refuse(self, path: str, message: str) -> Any:
        self.errors.append({"path": path, "message": message})
        return None
