"""The scripted model."""

from __future__ import annotations

import time
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import ValidationError

from app.graphs.scripted import PatternTooSlow, Script, ScriptedChatModel, convert
from app.graphs.tools import ToolRegistry

REFUND: dict[str, Any] = {
    "rules": [
        {
            "if": r"refund (?P<amount>\d+)",
            "tool_calls": [{"name": "refund", "args": {"order_id": "12345", "amount": "{amount}"}}],
        },
        {"if": "refund", "reply": "How much?"},
        {"after_tool": "refund", "reply": "Done: {result}"},
    ],
    "else": "You said: {input}",
}


def model(script: dict[str, Any] = REFUND, *tools: str) -> Any:
    made = ScriptedChatModel(script=Script.model_validate(script))
    registry = ToolRegistry()
    return made.bind_tools([registry[t].tool for t in tools]) if tools else made


def result(content: str, name: str = "refund") -> list[BaseMessage]:
    call = {"name": name, "args": {}, "id": "1", "type": "tool_call"}
    return [HumanMessage("refund 5"), AIMessage("", tool_calls=[call]), ToolMessage(content, name=name, tool_call_id="1")]


async def test_the_first_rule_that_matches_wins_and_case_is_ignored() -> None:
    message = await model(REFUND, "refund").ainvoke("Please REFUND 1500!")
    assert message.tool_calls[0]["args"] == {"order_id": "12345", "amount": 1500}
    assert (await model().ainvoke("refund it")).text == "How much?"
    assert (await model().ainvoke("hello")).text == "You said: hello"


async def test_rules_look_at_the_last_message_only() -> None:
    assert (await model().ainvoke(result("5 refunded"))).text == "Done: 5 refunded"
    assert (await model().ainvoke(result("sunny", "weather"))).text == "You said: refund 5"
    assert (await model().ainvoke([*result("x"), AIMessage("ok"), HumanMessage("bye")])).text == "You said: bye"
    assert (await model().ainvoke([HumanMessage("refund 5"), AIMessage("refund 5")])).text == "You said: refund 5"


async def test_placeholders_are_filled_once() -> None:
    script = {"rules": [{"if": "(?P<what>.+)", "reply": "{what} {input} {system} {unknown} {result}"}]}
    messages = [SystemMessage("{input}"), HumanMessage("{system}")]
    assert (await model(script).ainvoke(messages)).text == "{system} {system} {input} {unknown} {result}"


async def test_content_blocks_are_text() -> None:
    message = HumanMessage([{"type": "text", "text": "refund 7"}])
    assert (await model(REFUND, "refund").ainvoke([message])).tool_calls[0]["args"]["amount"] == 7


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5.5", {"type": "number"}, 5.5),
        ("nan", {"type": "number"}, "nan"),
        ("five", {"type": "number"}, "five"),
        ("Yes", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("maybe", {"type": "boolean"}, "maybe"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("{", {"type": "object"}, "{"),
        ("5", {"anyOf": [{"type": "null"}, {"type": "integer"}]}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {}, "5"),
    ],
)
def test_an_argument_takes_the_type_of_its_schema(text: str, schema: dict[str, Any], value: Any) -> None:
    assert convert(text, schema) == value


async def test_only_an_argument_that_is_one_placeholder_is_converted() -> None:
    script = {
        "rules": [{"if": r"(?P<n>\d+)", "tool_calls": [{"name": "refund", "args": {"order_id": "{n}", "amount": "{n}0"}}]}]
    }
    assert (await model(script, "refund").ainvoke("5")).tool_calls[0]["args"] == {"order_id": "5", "amount": "50"}


async def test_what_streams_is_what_is_returned() -> None:
    script = {
        "rules": [
            {
                "if": "go",
                "reply": "One  moment,\nplease. ",
                "tool_calls": [{"name": "a", "args": {"x": "é" * 50}}, {"name": "b"}],
            }
        ]
    }
    whole = await model(script).ainvoke("go")
    chunks = [c async for c in model(script).astream("go")]
    assert len(chunks) > 6
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk)
    assert total.content == whole.content == "One  moment,\nplease. "
    assert total.tool_calls == whole.tool_calls
    assert total.usage_metadata == whole.usage_metadata
    assert total.response_metadata == whole.response_metadata


async def test_it_says_that_it_is_scripted() -> None:
    message = await model().ainvoke("hello")
    assert message.response_metadata["model_provider"] == "scripted"
    assert model()._get_ls_params()["ls_provider"] == "scripted"
    assert model()._llm_type == "scripted"


async def test_call_ids_are_unique_and_repeatable() -> None:
    script = {"rules": [{"if": "go", "tool_calls": [{"name": "a"}, {"name": "a"}]}]}
    first = await model(script).ainvoke([HumanMessage("go", id="1")])
    again = await model(script).ainvoke([HumanMessage("go", id="1")])
    later = await model(script).ainvoke([HumanMessage("go", id="1"), first, HumanMessage("go", id="2")])
    ids = [c["id"] for m in (first, later) for c in m.tool_calls]
    assert len(set(ids)) == 4
    assert first.tool_calls == again.tool_calls


async def test_latency_delays_each_call() -> None:
    slow = model({"rules": [], "else": "hi", "latency_ms": 60})
    for call in (slow.ainvoke("x"), anext(slow.astream("x"))):
        start = time.perf_counter()
        await call
        assert time.perf_counter() - start >= 0.06
    start = time.perf_counter()
    slow.invoke("x")
    assert time.perf_counter() - start >= 0.06


async def test_a_pattern_cannot_stop_the_server() -> None:
    script = {"rules": [{"if": r"(?:a|aa)+$", "reply": "x"}]}
    start = time.perf_counter()
    with pytest.raises(PatternTooSlow, match="takes too long"):
        await model(script).ainvoke("a" * 60 + "!")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    "rule",
    [
        {"if": "("},
        {"if": "a", "after_tool": "b", "reply": "x"},
        {"reply": "x"},
        {"if": "a"},
        {"if": "a", "reply": 1},
        {"if": "a", "reply": "x", "then": "y"},
        {"if": "a", "tool_calls": [{"args": {}}]},
    ],
)
def test_a_wrong_script_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Script.model_validate({"rules": [rule]})
