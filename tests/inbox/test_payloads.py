"""Interrupt values of every shape, and answers in the dialect of the graph that asked."""

from __future__ import annotations

from typing import Any

import pytest

from app.inbox.payloads import Answer, Kind, from_client, read, to_graph

CONFIG = {"allow_accept": True, "allow_edit": True, "allow_respond": False, "allow_ignore": True}
HUMAN = {
    "action_request": {"action": "audit", "args": {"amount": 5}},
    "config": CONFIG,
    "description": "Look at this",
    "type": "tool_review",
    "tool_call_id": "call_1",
    "message_id": "ai-1",
    "call_index": 0,
}
FUNCTIONAL = {"question": "Is this correct?", "tool_call": {"name": "pay", "args": {"amount": 5}, "id": "call_9"}}
EDIT = {"action": "audit", "args": {"amount": 6}}


def test_the_value_of_our_own_gate() -> None:
    question = read([HUMAN])
    assert question.kind == Kind.tool
    assert question.action_request == {"action": "audit", "args": {"amount": 5}}
    assert question.config == CONFIG
    assert (question.tool, question.tool_call_id, question.message_id, question.call_index) == ("audit", "call_1", "ai-1", 0)
    assert question.description == "Look at this"


def test_a_plain_human_interrupt() -> None:
    question = read({"action_request": {"action": "mail", "args": {}}, "config": CONFIG})
    assert (question.kind, question.tool, question.message_id, question.description) == (Kind.tool, "mail", None, None)


def test_a_question_about_a_call() -> None:
    question = read(FUNCTIONAL)
    assert (question.kind, question.tool, question.tool_call_id) == (Kind.tool, "pay", "call_9")
    assert question.config == {"allow_accept": True, "allow_edit": True, "allow_respond": True, "allow_ignore": False}


@pytest.mark.parametrize(
    ("value", "kind", "description"),
    [
        ("Really?", Kind.question, "Really?"),
        ({"question": "Which one?", "options": [1, 2]}, Kind.question, "Which one?"),
        ({"question": ""}, Kind.raw, None),
        ("", Kind.raw, None),
        (None, Kind.raw, None),
        (0, Kind.raw, None),
        ([], Kind.raw, None),
        ({}, Kind.raw, None),
        ([HUMAN, HUMAN], Kind.raw, None),
        ({**HUMAN, "config": None}, Kind.raw, None),
        ({**HUMAN, "config": {}}, Kind.raw, None),
        ({**HUMAN, "config": {"allow_accept": "yes"}}, Kind.raw, None),
        ({**HUMAN, "action_request": {"args": {}}}, Kind.raw, None),
        ({**HUMAN, "action_request": {"action": "x", "args": [1]}}, Kind.raw, None),
        ({"question": "Correct?", "tool_call": {"args": {}}}, Kind.question, "Correct?"),
        ([FUNCTIONAL], Kind.raw, None),
        ({"breakpoint": {"checkpoint_id": "1", "nodes": ["a"]}}, Kind.raw, None),
    ],
)
def test_everything_else_is_answered_freely(value: Any, kind: Kind, description: str | None) -> None:
    question = read(value)
    assert (question.kind, question.description, question.action_request) == (kind, description, None)
    assert [flag for flag, allowed in question.config.items() if allowed] == ["allow_respond"]


@pytest.mark.parametrize("odd", [{"call_index": True}, {"call_index": "0"}, {"message_id": ""}, {"message_id": 5}])
def test_a_call_that_is_not_named_properly_is_not_bound(odd: dict[str, Any]) -> None:
    question = read([{**HUMAN, **odd}])
    assert None in (question.message_id, question.call_index)


@pytest.mark.parametrize(
    ("answer", "native"),
    [
        (Answer("accept"), {"action": "continue"}),
        (Answer("edit", {"action": "pay", "args": {"amount": 6}}), {"action": "update", "data": {"amount": 6}}),
        (Answer("response", "No."), {"action": "feedback", "data": "No."}),
    ],
)
def test_dialects(answer: Answer, native: dict[str, Any]) -> None:
    assert to_graph(Kind.tool, [HUMAN], answer) == [{"type": answer.type, "args": answer.args}]
    assert to_graph(Kind.tool, HUMAN, answer) == {"type": answer.type, "args": answer.args}
    assert to_graph(Kind.tool, FUNCTIONAL, answer) == native
    assert from_client(Kind.tool, FUNCTIONAL, native) == answer


@pytest.mark.parametrize(
    "value", [None, False, "", 0, {}, [], {"d41d8cd98f00b204e9800998ecf8427e": 1}, {"type": "accept"}, [{"type": "accept"}]]
)
def test_a_free_answer_is_the_answer_itself(value: Any) -> None:
    answer = from_client(Kind.raw, "?", value)
    assert answer is not None
    assert to_graph(Kind.raw, "?", answer) == value
    assert type(to_graph(Kind.raw, "?", answer)) is type(value)


@pytest.mark.parametrize(
    ("sent", "parsed"),
    [
        ([{"type": "accept", "args": None}], Answer("accept")),
        ({"type": "accept"}, Answer("accept")),
        ({"type": "edit", "args": EDIT}, Answer("edit", EDIT)),
        ({"action": "continue"}, None),
        ([{"type": "accept"}, {"type": "accept"}], None),
        ([], None),
        ("yes", None),
        (None, None),
        ({"type": 5}, None),
        ({"type": "accept", "args": None, "more": 1}, None),
        ({"args": None}, None),
    ],
)
def test_what_a_client_may_send_to_our_gate(sent: Any, parsed: Answer | None) -> None:
    assert from_client(Kind.tool, [HUMAN], sent) == parsed
