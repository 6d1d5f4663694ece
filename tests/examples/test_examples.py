"""The examples' scripts do what their descriptions say."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from app.examples.assistants import EXAMPLES, MEMORY_SCRIPT, REFUND_SCRIPT, WEATHER_SCRIPT
from app.graphs.scripted import Script, ScriptedChatModel

TYPES = {
    "refund": {"properties": {"order_id": {"type": "string"}, "amount": {"type": "number"}}},
    "audit": {"properties": {"order_id": {"type": "string"}, "amount": {"type": "number"}}},
}


def say(script: dict[str, Any], text: str) -> AIMessage:
    return ScriptedChatModel(script=Script.model_validate(script), schemas=TYPES).answer([HumanMessage(text)])


@pytest.mark.parametrize(
    ("text", "tool", "amount", "order"),
    [
        ("Please refund 1500 for order 12345, it arrived broken.", "audit", 1500, "12345"),
        ("refund 1000 for order A-1", "audit", 1000, "A-1"),
        ("refund 999.99 for order A-1", "refund", 999.99, "A-1"),
        ("Refund of $80 on my order #7, bought in 2026", "refund", 80, "7"),
        ("refund order 12345, amount 1500", "audit", 1500, "12345"),
        ("Refund order 12345: 20 please", "refund", 20, "12345"),
    ],
)
def test_refunds_from_1000_on_go_to_the_audit(text: str, tool: str, amount: float, order: str) -> None:
    [call] = say(REFUND_SCRIPT, text).tool_calls
    assert (call["name"], call["args"]) == (tool, {"order_id": order, "amount": amount})


@pytest.mark.parametrize("text", ["refund 1,500 for order 12345", "refund my order 12345", "hello"])
def test_what_the_script_cannot_read_is_asked_for(text: str) -> None:
    answer = say(REFUND_SCRIPT, text)
    assert answer.tool_calls == []
    assert "refund 1500 for order 12345" in answer.text


def test_weather_and_memory() -> None:
    [call] = say(WEATHER_SCRIPT, "What is the weather in San Francisco?").tool_calls
    assert call["args"] == {"location": "San Francisco"}
    [call] = say(MEMORY_SCRIPT, "Please remember that I live in Lisbon.").tool_calls
    assert (call["name"], call["args"]) == ("save_memory", {"memory": "I live in Lisbon"})
    [call] = say(MEMORY_SCRIPT, "Where do I live?").tool_calls
    assert (call["name"], call["args"]) == ("search_memory", {"query": "Where do I live?"})


def test_the_demo_is_labelled_as_scripted() -> None:
    demo = next(e for e in EXAMPLES if e.name == "demo")
    assert demo.config["configurable"]["model"]["provider"] == "scripted"
    assert "script" in (demo.description or "")
