"""The one JSON encoding, and the cleaning of what comes in."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langgraph.types import Interrupt
from pydantic import BaseModel

from app.codec import clean, dumps, jsonable

Point = namedtuple("Point", "x y")


class Model(BaseModel):
    at: datetime


@dataclass
class Data:
    n: int


COMMON = {"additional_kwargs": {}, "response_metadata": {}, "name": None}
AI = {"tool_calls": [], "invalid_tool_calls": [], "usage_metadata": None}


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (HumanMessage("hi", id="1"), {"content": "hi", **COMMON, "type": "human", "id": "1"}),
        (SystemMessage("s", id="1"), {"content": "s", **COMMON, "type": "system", "id": "1"}),
        (AIMessage("a", id="1"), {"content": "a", **COMMON, "type": "ai", "id": "1", **AI}),
        (
            AIMessageChunk("a", id="1"),
            {
                "content": "a",
                **COMMON,
                "type": "AIMessageChunk",
                "id": "1",
                **AI,
                "tool_call_chunks": [],
                "chunk_position": None,
            },
        ),
        (
            ToolMessage("t", id="1", tool_call_id="c"),
            {"content": "t", **COMMON, "type": "tool", "id": "1", "tool_call_id": "c", "artifact": None, "status": "success"},
        ),
    ],
)
def test_messages_have_the_wire_s_shape(message: Any, wire: dict[str, Any]) -> None:
    assert jsonable(message) == wire


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (2**70, str(2**70)),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        ("\ud800x", "?x"),
        ({"\ud800": 1}, {"?": 1}),
        ({1: "a", None: "b"}, {"1": "a", "null": "b"}),
        ({(1, 2): "a"}, {"(1, 2)": "a"}),
        ({1, 2}, [1, 2]),
        (b"\xffok", "\ufffdok"),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Data(3), {"n": 3}),
        (Model(at=datetime(2026, 1, 2, tzinfo=UTC)), {"at": "2026-01-02T00:00:00+00:00"}),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.5"), "1.5"),
        (ValueError("no"), "ValueError('no')"),
        (Interrupt(value=1, id="x"), {"value": 1, "id": "x", "response_schema": None}),
        ([Interrupt(value=2**70, id="x")], [{"value": str(2**70), "id": "x", "response_schema": None}]),
        ([HumanMessage("\ud800", id="1")], [{"content": "?", **COMMON, "type": "human", "id": "1"}]),
    ],
)
def test_anything_a_state_may_hold_becomes_json(value: Any, expected: Any) -> None:
    assert json.loads(dumps(value)) == expected


def test_cleaning_removes_what_postgres_refuses() -> None:
    assert clean({"a\0": ["x\0y", {"b": "\ud800z"}], "n": 1}) == {"a": ["xy", {"b": "z"}], "n": 1}


def test_cleaning_copies_nothing_when_there_is_nothing_to_clean() -> None:
    value = {"a": ["x", {"b": "ü"}]}
    assert clean(value) is value
