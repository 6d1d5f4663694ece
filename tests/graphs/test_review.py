"""The pure parts of the review."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from langchain_core.messages import AIMessage

from app.graphs.config import ReviewRule
from app.graphs.review import Rule, args_hash, edit_note, with_calls
from app.graphs.tools import ToolRegistry

SCHEMA = ToolRegistry()["refund"].schema


def test_the_hash_names_what_json_cannot_tell_apart() -> None:
    same = [{"a": 1500, "b": [1, {"c": 2}]}, {"b": [1.0, {"c": 2}], "a": 1500.0}]
    assert len({args_hash("pay", a) for a in same}) == 1
    different = [{"a": 1}, {"a": "1"}, {"a": True}, {"a": None}, {"a": 1.5}, {"a": [1]}, {"b": 1}, {}]
    assert len({args_hash("pay", a) for a in different}) == len(different)
    assert args_hash("pay", {}) != args_hash("wipe", {})
    for odd in (float("nan"), 10**30, "\ud800\0", 1e22):
        assert args_hash("pay", {"a": odd}) == args_hash("pay", {"a": odd})
    stored = json.loads(json.dumps({"a": 0.1, "b": 1e21, "c": -0.0}))
    assert args_hash("pay", stored) == args_hash("pay", {"a": 0.1, "b": 1000000000000000000000, "c": 0})


@pytest.mark.parametrize("flags", range(1, 16))
def test_the_published_schema_takes_what_the_check_takes(flags: int) -> None:
    names = ("allow_accept", "allow_edit", "allow_respond", "allow_ignore")
    rule = Rule("refund", ReviewRule(**{n: bool(flags & 1 << i) for i, n in enumerate(names)}), SCHEMA)
    good = {"action": "refund", "args": {"order_id": "1", "amount": 5}}
    for answer in (
        {"type": "accept", "args": None},
        {"type": "accept"},
        {"type": "edit", "args": good},
        {"type": "edit", "args": {**good, "action": "audit"}},
        {"type": "edit", "args": {"action": "refund", "args": {"order_id": "1"}}},
        {"type": "edit", "args": {"action": "refund", "args": {"order_id": "1", "amount": -1}}},
        {"type": "edit", "args": {"action": "refund", "args": {"order_id": "1", "amount": 5, "more": 1}}},
        {"type": "response", "args": "no"},
        {"type": "response", "args": ""},
        {"type": "ignore", "args": None},
        {"type": "ignore"},
        {"type": "approve"},
    ):
        try:
            jsonschema.validate(answer, rule.answer_schema())
            published = True
        except jsonschema.ValidationError:
            published = False
        try:
            rule.check(answer)
            taken = True
        except ValueError:
            taken = False
        assert published is taken, answer


def test_definitions_of_a_schema_stay_reachable() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
    rule = Rule("t", ReviewRule(), schema)
    answer: dict[str, Any] = {"type": "edit", "args": {"action": "t", "args": {"x": 1}}}
    jsonschema.validate(answer, rule.answer_schema())
    assert rule.check(answer)
    answer["args"]["args"]["x"] = "1"
    with pytest.raises(ValueError, match=r"args\.args\.x"):
        rule.check(answer)


def test_a_description_that_cannot_be_rendered_does_not_stop_the_question() -> None:
    rule = Rule("t", ReviewRule(description="{{ missing }}"), {})
    (human,) = rule.question({"name": "t", "args": {}, "id": "1", "type": "tool_call"}, "m", 0)
    assert human["description"] == "The agent wants to run t. It waits for your decision."


def call(id_: str, x: int) -> dict[str, Any]:
    return {"name": "t", "args": {"x": x}, "id": id_, "type": "tool_call"}


def test_an_edit_reaches_every_copy_of_a_call() -> None:
    message = AIMessage(
        [
            {"type": "text", "text": "calling"},
            {"type": "tool_use", "id": "a", "name": "t", "input": {"x": 1}, "partial_json": '{"x": 1}'},
            {"type": "function_call", "id": "fc_1", "call_id": "b", "name": "t", "arguments": '{"x": 2}'},
            {"type": "tool_call", "id": "c", "name": "t", "args": {"x": 3}},
        ],
        id="m",
        tool_calls=[call("a", 1), call("b", 2), call("c", 3)],
        additional_kwargs={"tool_calls": [{"id": "a", "type": "function", "function": {"name": "t", "arguments": '{"x": 1}'}}]},
        response_metadata={"model_name": "x"},
    )
    before = message.model_dump()
    edited = with_calls(
        message, {0: {"args": {"x": 10}}, 1: {"args": {"x": 20}}, 2: {"args": {"x": 30}}}, {"reviewed_from": {"a": 1}}
    )
    assert message.model_dump() == before, "the original is not touched"
    assert edited.id == "m"
    assert [c["args"]["x"] for c in edited.tool_calls] == [10, 20, 30]
    assert edited.content[1] == {"type": "tool_use", "id": "a", "name": "t", "input": {"x": 10}}
    assert edited.content[2]["arguments"] == '{"x": 20}'  # type: ignore[index, call-overload]
    assert edited.content[2]["id"] == "fc_1"  # type: ignore[index, call-overload]
    assert edited.content[3]["args"] == {"x": 30}  # type: ignore[index, call-overload]
    assert edited.additional_kwargs["tool_calls"][0]["function"]["arguments"] == '{"x": 10}'
    assert edited.response_metadata == {"model_name": "x", "reviewed_from": {"a": 1}}


def test_equal_ids_are_told_apart_by_their_order() -> None:
    message = AIMessage(
        [
            {"type": "tool_use", "id": "a", "name": "t", "input": {"x": 1}},
            {"type": "tool_use", "id": "a", "name": "t", "input": {"x": 2}},
        ],
        tool_calls=[call("a", 1), call("a", 2)],
    )
    changed = with_calls(message, {1: {"id": "b"}})
    assert [c["id"] for c in changed.tool_calls] == ["a", "b"]
    assert [b["id"] for b in changed.content] == ["a", "b"]  # type: ignore[index, call-overload]
    assert [b["input"]["x"] for b in changed.content] == [1, 2]  # type: ignore[index, call-overload]


def test_the_note_names_what_changed() -> None:
    assert edit_note({"a": 1, "b": "x", "c": 0}, {"a": 2, "b": "x", "d": [1]}) == (
        "Note: a reviewer changed a from 1 to 2, removed c, set d to [1] before this call was run."
    )
    assert edit_note({"a": 1}, {"a": 1}) == ""
