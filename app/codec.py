"""The one JSON encoding of everything that leaves the server, and the cleaning of what comes in.

Messages are encoded by hand: `model_dump` of a chunk costs more than all the rest of sending it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orjson
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langgraph.types import Interrupt
from pydantic import BaseModel

from app.errors import TooLarge

OPTIONS = orjson.OPT_NON_STR_KEYS
LARGEST = 128 * 2**20
"""Bytes of one value that a graph may store or emit. Postgres itself refuses a text of twice that in its JSON."""


def dumps(value: Any) -> bytes:
    """JSON bytes of any value that a graph may put into its state. Never raises for its content: unknown becomes text."""
    try:
        return orjson.dumps(value, default=_default, option=OPTIONS)
    except (TypeError, ValueError, RecursionError):
        # Integers beyond 64 bits, lone surrogates, odd keys, subclasses of str: rare, so found out the slow way.
        return orjson.dumps(_plain(value), option=OPTIONS)


def check_size(size: int) -> None:
    """Refuse a value that is too large to be stored: TooLarge `state_too_large`."""
    if size > LARGEST:
        raise TooLarge(
            f"The graph made a value of {size / 2**20:.0f} MB, and {LARGEST // 2**20} MB is the most. "
            "Keep such data elsewhere, and a reference to it in the state.",
            code="state_too_large",
        )


def jsonable(value: Any) -> Any:
    """The value as plain JSON data."""
    return orjson.loads(dumps(value))


def message_dict(message: BaseMessage) -> dict[str, Any]:
    """A message in the wire's shape."""
    shown: dict[str, Any] = {
        "content": message.content,
        "additional_kwargs": message.additional_kwargs,
        "response_metadata": message.response_metadata,
        "type": message.type,
        "name": message.name,
        "id": message.id,
    }
    if isinstance(message, AIMessage):
        shown["tool_calls"] = message.tool_calls
        shown["invalid_tool_calls"] = message.invalid_tool_calls
        shown["usage_metadata"] = message.usage_metadata
        if isinstance(message, AIMessageChunk):
            shown["tool_call_chunks"] = message.tool_call_chunks
            shown["chunk_position"] = message.chunk_position
    elif isinstance(message, ToolMessage):
        shown["tool_call_id"] = message.tool_call_id
        shown["artifact"] = message.artifact
        shown["status"] = message.status
    elif type(message).model_fields.keys() - BaseMessage.model_fields.keys():
        return {**message.model_dump(), **shown}
    return shown


def _default(value: Any) -> Any:
    """What orjson does not know by itself."""
    if isinstance(value, BaseMessage):
        return message_dict(value)
    if isinstance(value, Interrupt):
        return {"value": value.value, "id": value.id, "response_schema": value.response_schema}
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, type):
        return repr(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, BaseException):
        return repr(value)
    if hasattr(value, "_asdict"):
        return value._asdict()
    return str(value)


def _plain(value: Any) -> Any:
    """The value rebuilt from what JSON can hold."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, Mapping):
        return {str(k).encode("utf-8", "replace").decode(): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Interrupt):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _plain(_default(value))


def clean(value: Any) -> Any:
    """The value without NUL characters and lone surrogates, which Postgres takes nowhere. Itself, if it has none."""
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, dict):
        cleaned = {clean(k): clean(v) for k, v in value.items()}
        same = all(a is c and b is d for (a, b), (c, d) in zip(value.items(), cleaned.items(), strict=False))
        return value if same and len(cleaned) == len(value) else cleaned
    if isinstance(value, list):
        items = [clean(v) for v in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else items
    return value


def _clean_text(text: str) -> str:
    if "\0" in text:
        text = text.replace("\0", "")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-8", "ignore").decode()
    return text
