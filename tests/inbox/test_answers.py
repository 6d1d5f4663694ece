"""Answers checked against items: every combination of flags, every way to be wrong."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from typing import Any

import pytest

from app.errors import Invalid
from app.graphs.review import args_hash
from app.inbox.answers import check, differences, same
from app.inbox.models import InboxItem
from app.inbox.payloads import FLAGS, Answer, Kind

ARGS = {"to": {"street": "Main", "number": 5}, "parts": [1, 2], "ratio": 0.5, "id": 2**53 + 1}
REQUEST = {"action": "mixed", "args": ARGS}
SCHEMA = {
    "type": "object",
    "$defs": {
        "Address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            "required": ["street"],
        }
    },
    "properties": {
        "to": {"$ref": "#/$defs/Address"},
        "parts": {"type": "array", "items": {"type": "integer"}},
        "ratio": {"type": "number"},
        "id": {"type": "integer"},
        "extra": {"type": "string"},
    },
    "required": ["to", "parts"],
}
GOOD = {"accept": None, "edit": REQUEST, "response": "No, thank you.", "ignore": None}


def item(schema: Any = SCHEMA, **flags: bool) -> InboxItem:
    config = {flag: flags.get(flag, not flags) for flag in FLAGS.values()}
    return InboxItem(
        kind=Kind.tool, config=config, action_request=REQUEST, args_schema=schema, args_hash=args_hash("mixed", ARGS)
    )


def free(schema: Any = None) -> InboxItem:
    config = {flag: flag == "allow_respond" for flag in FLAGS.values()}
    return InboxItem(kind=Kind.raw, config=config, args_schema=schema, action_request=None, args_hash=None)


def edited(**changes: Any) -> Answer:
    return Answer("edit", {"action": "mixed", "args": {**ARGS, **changes}})


def paths(error: pytest.ExceptionInfo[Invalid]) -> set[str]:
    return {e["path"] for e in error.value.extra["errors"]}


@pytest.mark.parametrize("allowed", [c for c in itertools.product([True, False], repeat=4) if any(c)])
def test_each_combination_of_flags_allows_its_verbs_only(allowed: tuple[bool, ...]) -> None:
    one = item(**dict(zip(FLAGS.values(), allowed, strict=True)))
    for verb, ok in zip(FLAGS, allowed, strict=True):
        if ok:
            assert check(one, Answer(verb, GOOD[verb])).answer == Answer(verb, GOOD[verb])
        else:
            with pytest.raises(Invalid) as error:
                check(one, Answer(verb, GOOD[verb]))
            assert error.value.code == "verb_not_allowed"
            assert paths(error) == {"type"}


def test_respond_is_another_word_for_response() -> None:
    assert check(item(), Answer("respond", "Later.")).answer == Answer("response", "Later.")


@pytest.mark.parametrize(
    "args",
    [None, REQUEST, {"action": "mixed", "args": {**ARGS, "ratio": 0.5, "parts": [1.0, 2.0]}}],
    ids=["null", "same", "1.0"],
)
def test_accept_takes_null_or_what_was_shown(args: Any) -> None:
    assert check(item(), Answer("accept", args)).args_hash == args_hash("mixed", ARGS)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"action": "mixed", "args": {**ARGS, "ratio": 0.6}}, "action_request_differs"),
        ({"action": "other", "args": ARGS}, "action_request_differs"),
        (ARGS, "action_request_differs"),
        (True, "action_request_differs"),
        ("", "action_request_differs"),
        ({"action": "mixed", "args": {**ARGS, "id": 2**53}}, "unsafe_integer"),
    ],
)
def test_accept_of_something_else_is_refused(args: Any, code: str) -> None:
    with pytest.raises(Invalid) as error:
        check(item(), Answer("accept", args))
    assert error.value.code == code


def test_an_edit_is_stored_with_its_differences() -> None:
    checked = check(item(), edited(ratio=1, to={"street": "Side"}, extra="x"))
    assert checked.args_hash == args_hash("mixed", {**ARGS, "ratio": 1, "to": {"street": "Side"}, "extra": "x"})
    assert checked.diff == [
        {"path": "args.to.street", "before": "Main", "after": "Side"},
        {"path": "args.to.number", "before": 5},
        {"path": "args.ratio", "before": 0.5, "after": 1},
        {"path": "args.extra", "after": "x"},
    ]
    assert check(item(), edited()).diff == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"ratio": "0.5"}, "args.args.ratio"),
        ({"ratio": True}, "args.args.ratio"),
        ({"ratio": None}, "args.args.ratio"),
        ({"parts": ["1"]}, "args.args.parts.0"),
        ({"parts": [1, 2.5]}, "args.args.parts.1"),
        ({"parts": "12"}, "args.args.parts"),
        ({"to": {}}, "args.args.to.street"),
        ({"to": {"street": "Main", "zip": 1}}, "args.args.to.zip"),
        ({"to": "Main 5"}, "args.args.to"),
        ({"unknown": 1}, "args.args.unknown"),
        ({"id": 2**53}, "args.args.id"),
        ({"id": float(2**53)}, "args.args.id"),
        ({"parts": [2**60, 2]}, "args.args.parts.0"),
        ({"ratio": float("nan")}, "args.args.ratio"),
        ({"ratio": float("inf")}, "args.args.ratio"),
        ({"ratio": 10**30}, "args.args.ratio"),
    ],
)
def test_a_bad_edit_names_its_fault(change: dict[str, Any], path: str) -> None:
    with pytest.raises(Invalid) as error:
        check(item(), edited(**change))
    assert path in paths(error)


@pytest.mark.parametrize(
    "args",
    [None, {}, [], "x", ARGS, {"action": "mixed"}, {"args": ARGS}, {**REQUEST, "x": 1}, {"action": "mixed", "args": None}],
)
def test_an_edit_has_an_action_and_arguments(args: Any) -> None:
    with pytest.raises(Invalid) as error:
        check(item(), Answer("edit", args))
    assert paths(error) == {"args"}


def test_an_edit_keeps_the_action() -> None:
    with pytest.raises(Invalid) as error:
        check(item(), Answer("edit", {"action": "refund", "args": ARGS}))
    assert paths(error) == {"args.action"}


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(Invalid) as error:
        check(item(), Answer("edit", {"action": "mixed", "args": {}}))
    assert paths(error) == {"args.args.to", "args.args.parts"}


def test_a_large_integer_that_was_not_changed_is_fine() -> None:
    assert check(item(), edited(ratio=0.7)).answer.args["args"]["id"] == 2**53 + 1


def test_without_a_schema_an_edit_needs_only_its_shape() -> None:
    assert check(item(None), edited(unknown=1)).diff == [{"path": "args.unknown", "after": 1}]


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "https://example.com/x.json"}, {"$ref": "#/$defs/none"}])
def test_a_broken_schema_lets_nothing_through_and_fetches_nothing(schema: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as error:
        check(item(schema), edited())
    assert error.value.code == "schema_unusable"
    assert check(item(schema), Answer("accept")).answer.type == "accept"


@pytest.mark.parametrize("args", [None, "", "  \n", 5, {}, ["x"], True])
def test_a_response_is_a_text(args: Any) -> None:
    with pytest.raises(Invalid):
        check(item(), Answer("response", args))


@pytest.mark.parametrize("args", ["", False, 0, {}, REQUEST])
def test_ignore_says_nothing(args: Any) -> None:
    with pytest.raises(Invalid):
        check(item(), Answer("ignore", args))


@pytest.mark.parametrize("value", [None, False, "", 0, 0.5, {}, [], {"d41d8cd98f00b204e9800998ecf8427e": {"a": [None]}}, 2**62])
def test_a_free_question_takes_any_json(value: Any) -> None:
    assert check(free(), Answer("response", value)).answer.args == value


def test_a_free_answer_must_be_there() -> None:
    with pytest.raises(Invalid):
        check(free(), Answer("response", None, given=False))


def test_a_free_answer_fits_its_schema() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    assert check(free(schema), Answer("response", {"ok": True, "more": 1})).answer.args == {"ok": True, "more": 1}
    with pytest.raises(Invalid) as error:
        check(free(schema), Answer("response", {"ok": "yes"}))
    assert paths(error) == {"args.ok"}


@pytest.mark.parametrize(("sent", "stored"), [(1e16, 10**16), (-0.0, 0.0), (1e-7, 1e-7), (1.0, 1.0), (1e300, 1e300)])
def test_numbers_are_what_the_database_gives_back(sent: float, stored: float) -> None:
    got = check(free(), Answer("response", [sent])).answer.args[0]
    assert (got, type(got), str(got)) == (stored, type(stored), str(stored))


def test_nesting_has_an_end() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(Invalid) as error:
        check(free(), Answer("response", deep))
    assert error.value.code == "too_deep"


def test_no_answer_is_anything_but_checked_or_refused() -> None:
    rng = random.Random(7)
    leaves = [None, True, False, 0, -1, 2**53 + 1, 2**70, 1.5, float("nan"), "", "x", "accept", "mixed", "args", "action"]

    def value(depth: int) -> Any:
        kind = rng.randrange(4 if depth < 4 else 2)
        if kind < 2:
            return rng.choice(leaves)
        if kind == 2:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        keys = ["action", "args", "to", "parts", "ratio", "street", "x.y", ""]
        return {rng.choice(keys): value(depth + 1) for _ in range(rng.randrange(5))}

    passed = 0
    for one in (item(), item(None), free(), free(SCHEMA)):
        for _ in range(1500):
            answer = Answer(rng.choice([*FLAGS, "respond", "", "x"]), value(0), rng.random() < 0.9)
            with suppress(Invalid):  # and nothing else
                check(one, answer)
                passed += 1
    assert 100 < passed < 5900


def test_equality_is_that_of_json() -> None:
    assert same({"a": [1, 2.0]}, {"a": [1.0, 2]})
    assert not same(True, 1)
    assert not same(0, False)
    assert not same([1], [1, 2])
    assert not same({"a": 1}, {"a": 1, "b": None})
    assert differences([1, 2], [1, 3], "x") == [{"path": "x", "before": [1, 2], "after": [1, 3]}]
